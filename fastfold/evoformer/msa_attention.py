"""Attention within the MSA: along rows with pair bias, along columns, and global along columns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.attention import Attention, GlobalAttention, columns, self_attention
from fastfold.evoformer.execution import Executed, add_update
from fastfold.evoformer.primitives import LayerNorm, Linear, SharedDropout


class MSARowAttention(Executed):
    """Row-wise gated self-attention with pair bias (supplement Algorithm 7), as a residual update.

    Args:
        config: Official config node (``num_head``, ``gating``, ``dropout_rate``).
        c_m: MSA channels.
        c_z: Pair channels.
        zero_init: Initialise the output projection with zeros.
    """

    operator = "MSA attention"

    def __init__(self, config: Any, c_m: int, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.pair_norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, config.num_head, bias=False)
        self.attention = Attention(
            c_m,
            c_m,
            c_m,
            heads=config.num_head,
            c_hidden=c_m,
            gating=config.gating,
            zero_init=zero_init,
        )
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-3)

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Updated ``msa [*, S, N, c_m]`` from ``pair [*, N, N, c_z]`` and ``msa_mask [*, S, N]``.

        ``bias`` is that of the pair if it was computed before.
        """
        bias = self.bias(pair) if bias is None else bias

        def branch(rows: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            mask = msa_mask[..., index, :]
            return self_attention(self.norm, self.attention, rows, bias, mask, dropout, out)

        return self.policy.residual(msa, branch, dim=-3, dropout=self.dropout(msa))

    def bias(self, pair: Tensor) -> Tensor:
        """Bias of the logits ``[*, H, N, N]`` from ``pair [*, N, N, c_z]``."""
        return kernels.pair_bias(pair, self.pair_norm.weight, self.pair_norm.bias, self.pair_bias.weight)


class MSAColumnAttention(Executed):
    """Column-wise gated self-attention (supplement Algorithm 8), as a residual update.

    Args:
        config: Official config node (``num_head``, ``gating``, ``dropout_rate``).
        c_m: MSA channels.
        zero_init: Initialise the output projection with zeros.
    """

    operator = "MSA attention"

    def __init__(self, config: Any, c_m: int, *, zero_init: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = Attention(
            c_m,
            c_m,
            c_m,
            heads=config.num_head,
            c_hidden=c_m,
            gating=config.gating,
            zero_init=zero_init,
        )
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-2)

    def forward(self, msa: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated ``msa [*, S, N, c_m]`` under ``msa_mask [*, S, N]``."""

        def branch(block: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            mask = msa_mask[..., index].transpose(-2, -1)
            x, dropout, out = block.transpose(-3, -2), columns(dropout), columns(out)
            return self_attention(self.norm, self.attention, x, None, mask, dropout, out).transpose(-3, -2)

        return self.policy.residual(msa, branch, dim=-2, dropout=self.dropout(msa))


class MSAColumnGlobalAttention(Executed):
    """Global column attention of the extra MSA stack (supplement Algorithm 19), as a residual update.

    Args:
        config: Official config node (``num_head``, ``gating``, ``dropout_rate``).
        c_e: Extra MSA channels.
        zero_init: Initialise the output projection with zeros.
    """

    operator = "MSA attention"

    def __init__(self, config: Any, c_e: int, *, zero_init: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(c_e)
        self.attention = GlobalAttention(
            c_e, heads=config.num_head, gating=config.gating, zero_init=zero_init
        )
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-2)

    def forward(self, msa: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated ``msa [*, S, N, c_e]`` under ``msa_mask [*, S, N]``."""

        def branch(block: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            mask = msa_mask[..., index].transpose(-2, -1)
            update = self.attention(self.norm(block.transpose(-3, -2)), mask).transpose(-3, -2)
            return add_update(block, update if dropout is None else update * dropout, out)

        return self.policy.residual(msa, branch, dim=-2, dropout=self.dropout(msa))
