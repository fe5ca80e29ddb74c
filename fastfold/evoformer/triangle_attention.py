"""Triangular self-attention around starting and ending nodes (supplement Algorithms 13 and 14)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastfold.evoformer.attention import Attention
from fastfold.evoformer.dropout import SharedDropout
from fastfold.evoformer.execution import Executed
from fastfold.evoformer.primitives import LayerNorm, Linear


class TriangleAttention(Executed):
    """Attention of the pair tensor along rows (starting node) or columns (ending node).

    Args:
        config: Official config node; ``orientation`` ``per_row`` is the starting node, ``per_column`` the ending.
        c_z: Pair channels.
        zero_init: Initialise the output projection with zeros.
    """

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

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Updated ``pair [*, N, N, c_z]`` under ``pair_mask [*, N, N]``."""
        # [*, H, i, j] as read along rows of pair; the ending node sees the transposed tensor throughout.
        bias = self.policy.map(pair, lambda rows, _: self.pair_bias(self.norm(rows)), dim=-3)
        bias = bias.movedim(-1, -3)
        dropout = self.dropout(pair)
        if self.starting:

            def rows_update(rows: Tensor, index: slice) -> Tensor:
                x = self.norm(rows)
                return self.attention(x, x, bias, pair_mask[..., index, :])

            return self.policy.update(pair, rows_update, dim=-3, dropout=dropout)
        bias = bias.transpose(-2, -1)

        def columns_update(columns: Tensor, index: slice) -> Tensor:
            x = self.norm(columns.transpose(-3, -2))
            mask = pair_mask[..., index].transpose(-2, -1)
            return self.attention(x, x, bias, mask).transpose(-3, -2)

        return self.policy.update(pair, columns_update, dim=-2, dropout=dropout)
