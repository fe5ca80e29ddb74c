"""Transition: the two-layer perceptron after attention (supplement Algorithms 9 and 15)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Executed
from fastfold.evoformer.primitives import LayerNorm, Linear


class Transition(Executed):
    """Layer norm, linear, ReLU, linear on every position, as a residual update.

    Args:
        config: Official config node (``num_intermediate_factor``).
        c: Channels.
        zero_init: Initialise the last layer with zeros.
    """

    operator = "transition"

    def __init__(self, config: Any, c: int, *, zero_init: bool) -> None:
        super().__init__()
        hidden = c * config.num_intermediate_factor
        self.norm = LayerNorm(c)
        self.hidden = Linear(c, hidden, init="relu")
        self.output = Linear(hidden, c, init="final" if zero_init else "default")

    def forward(self, x: Tensor) -> Tensor:
        """Updated ``x [*, rows, columns, c]``."""

        def branch(rows: Tensor, _: slice, __: Tensor | None, out: Tensor | None) -> Tensor:
            return kernels.transition(
                rows,
                self.norm.weight,
                self.norm.bias,
                self.hidden.weight,
                self.hidden.bias,
                self.output.weight,
                self.output.bias,
                residual=rows,
                out=out,
            )

        return self.policy.residual(x, branch, dim=-3)
