"""Triangular self-attention around starting and ending nodes (supplement Algorithms 13 and 14)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.attention import Attention, columns, self_attention
from fastfold.evoformer.execution import Executed
from fastfold.evoformer.primitives import LayerNorm, Linear, SharedDropout


class TriangleAttention(Executed):
    """Attention of the pair tensor along rows (starting node) or columns (ending node).

    Args:
        config: Official config node; ``orientation`` ``per_row`` is the starting node, ``per_column`` the ending.
        c_z: Pair channels.
        zero_init: Initialise the output projection with zeros.
    """

    operator = "triangle attention"

    def __init__(self, config: Any, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.starting = config.orientation == "per_row"
        self.norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, config.num_head, bias=False)
        self.attention = Attention(
            c_z,
            c_z,
            c_z,
            heads=config.num_head,
            c_hidden=config.get("value_dim") or c_z,
            gating=config.gating,
            zero_init=zero_init,
        )
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-3 if self.starting else -2)

    def forward(self, pair: Tensor, pair_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Updated ``pair [*, N, N, c_z]`` under ``pair_mask [*, N, N]``; ``bias`` if it was computed before."""
        # [*, H, i, j] as read along rows of pair; the ending node sees the transposed tensor throughout.
        bias = self.bias(pair) if bias is None else bias
        if self.starting:

            def row_branch(rows: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
                mask = pair_mask[..., index, :]
                return self_attention(self.norm, self.attention, rows, bias, mask, dropout, out)

            return self.policy.residual(pair, row_branch, dim=-3, dropout=self.dropout(pair))
        # Turned once, not for every block; the contiguous one is what the operator reads fastest.
        bias = bias.transpose(-2, -1).contiguous()

        def column_branch(block: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            mask = pair_mask[..., index].transpose(-2, -1)
            x, dropout, out = block.transpose(-3, -2), columns(dropout), columns(out)
            return self_attention(self.norm, self.attention, x, bias, mask, dropout, out).transpose(-3, -2)

        return self.policy.residual(pair, column_branch, dim=-2, dropout=self.dropout(pair))

    def bias(self, pair: Tensor) -> Tensor:
        """Bias of the logits ``[*, H, N, N]`` from ``pair [*, N, N, c_z]``, as read along its rows."""
        return kernels.pair_bias(pair, self.norm.weight, self.norm.bias, self.pair_bias.weight)
