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

        def add_transition(block: Block) -> Tensor:
            parameters = kernels.TransitionParams(
                self.norm.weight,
                self.norm.bias,
                self.hidden.weight,
                self.hidden.bias,
                self.output.weight,
                self.output.bias,
            )
            return kernels.transition(block.x, parameters, residual=block.x, out=block.out)

        return self.policy.apply_residual(x, add_transition, dim=-3)
