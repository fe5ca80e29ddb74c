"""Transition: the two-layer perceptron after attention (supplement Algorithms 9 and 15)."""

from __future__ import annotations

from ml_collections import ConfigDict
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Block, PolicyModule
from fastfold.evoformer.primitives import LayerNorm, Linear


class Transition(PolicyModule):
    """Two-layer perceptron on every position (supplement Algorithms 9 and 15), as a residual update.

    - Line 1: the input is normalised.
    - Line 2: a linear layer widens the channels by ``num_intermediate_factor``.
    - Line 3: ReLU and a second linear layer restore the number of channels.
    - Algorithm 6, lines 4 and 10: the result is added.
    """

    operator = "transition"

    def __init__(self, config: ConfigDict, c: int, *, zero_init: bool) -> None:
        super().__init__()
        hidden = c * config.num_intermediate_factor
        self.norm = LayerNorm(c)
        self.hidden = Linear(c, hidden, init="relu")
        self.output = Linear(hidden, c, init="final" if zero_init else "default")

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + output(relu(hidden(norm(x))))``, ``[*, rows, columns, c]``."""
        parameters = self.collected(self.kernel_parameters)

        def add_transition(block: Block) -> Tensor:
            return kernels.transition(
                block.x, parameters, residual=block.x, out=block.out, keep=block.policy.keep_projections
            )

        return self.apply_residual(x, add_transition, dim=-3)

    def kernel_parameters(self) -> kernels.TransitionParams:
        """Return the parameters of :func:`fastfold.kernels.transition`."""
        return kernels.TransitionParams(
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            w1=self.hidden.weight,
            b1=self.hidden.bias,
            w2=self.output.weight,
            b2=self.output.bias,
        )
