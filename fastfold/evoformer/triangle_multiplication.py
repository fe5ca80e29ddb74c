"""Triangular multiplicative update (supplement Algorithms 11 and 12)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Executed
from fastfold.evoformer.primitives import LayerNorm, Linear, SharedDropout


class TriangleMultiplication(Executed):
    """Triangular multiplicative update with outgoing or incoming edges, as a residual update.

    The two projections of the triangle's edges are one layer of twice the width: the first half is the official
    program's ``left``, the second its ``right``. With incoming edges the official program contracts
    ``left[k, j]`` with ``right[k, i]``.

    Args:
        config: Official config node; the ``equation`` tells outgoing from incoming.
        c_z: Pair channels.
        zero_init: Initialise the output projection and gates as the supplement says (zero).
    """

    operator = "triangle multiplication"

    def __init__(self, config: Any, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.outgoing = config.equation == "ikc,jkc->ijc"
        c = config.num_intermediate_channel
        self.norm_in = LayerNorm(c_z)
        self.projection = Linear(c_z, 2 * c)
        self.gate = Linear(c_z, 2 * c, init="gating")
        self.norm_out = LayerNorm(c)
        self.output = Linear(c, c_z, init="final" if zero_init else "default")
        self.output_gate = Linear(c_z, c_z, init="gating")
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-3)

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Updated ``pair [*, N, N, c_z]`` under ``pair_mask [*, N, N]``."""

        def branch(_: Tensor, __: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            return kernels.triangle_multiplication(
                pair,
                pair_mask,
                norm_in_weight=self.norm_in.weight,
                norm_in_bias=self.norm_in.bias,
                proj_weight=self.projection.weight,
                proj_bias=self.projection.bias,
                gate_weight=self.gate.weight,
                gate_bias=self.gate.bias,
                norm_out_weight=self.norm_out.weight,
                norm_out_bias=self.norm_out.bias,
                out_weight=self.output.weight,
                out_bias=self.output.bias,
                out_gate_weight=self.output_gate.weight,
                out_gate_bias=self.output_gate.bias,
                outgoing=self.outgoing,
                residual=pair,
                dropout=dropout,
                out=out,
                plan=self.policy.contraction,
            )

        return self.policy.residual(pair, branch, dim=None, dropout=self.dropout(pair))
