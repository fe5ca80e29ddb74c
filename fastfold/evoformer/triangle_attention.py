"""Triangular self-attention around starting and ending nodes (supplement Algorithms 13 and 14)."""

from __future__ import annotations

from functools import partial

from ml_collections import ConfigDict
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.attention import Attention, kernel_parameters, self_attention
from fastfold.evoformer.execution import PolicyModule
from fastfold.evoformer.primitives import LayerNorm, Linear, SharedDropout


class TriangleAttention(PolicyModule):
    """Attention of the pair tensor along rows (starting node) or columns (ending node), as a residual update.

    Supplement Algorithm 13 around starting nodes; Algorithm 14 is the same on the transposed tensor.

    - Line 1: the pair is normalised.
    - Lines 2 and 4: queries, keys, values and gate are projected from it.
    - Line 3: the bias of each head is also projected from it: the third edge of each triangle.
    - Lines 5-7: the edges of a node attend to each other; see :class:`~fastfold.evoformer.attention.Attention`.
    - Algorithm 6, lines 8 and 9: the result is added with dropout factors that rows (starting) or columns share.

    ``orientation`` in the official config node is ``per_row`` for the starting node, ``per_column`` for the ending.
    """

    operator = "triangle attention"

    def __init__(self, config: ConfigDict, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.starting = config.orientation == "per_row"
        self.norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, config.num_head, bias=False)
        self.attention = Attention.of_node(config, c_z, config.get("value_dim"), zero_init=zero_init)
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-3 if self.starting else -2)

    def forward(self, pair: Tensor, pair_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``pair + dropout(attention(norm(pair)))``, ``[*, N, N, c_z]``.

        ``pair_mask [*, N, N]`` is 0 for padding, and ``bias`` a precomputed :meth:`bias` of the pair.
        """
        (parameters, of_bias), heads = self.collected(self.kernel_parameters), self.attention.heads
        by_row = self.starting
        is_laid_out = by_row and bias is None
        bias = kernels.pair_bias(pair, *of_bias, aligned=by_row) if bias is None else bias
        if not by_row:
            bias = bias.transpose(-2, -1)
        if not is_laid_out:  # laid out here, so that blocks do not each copy the bias
            bias = kernels.attention_bias(bias, parameters.query_weight.shape[0] // heads)
        add_attention = partial(self_attention, parameters, heads, bias=bias)
        dim = -3 if by_row else -2
        return self.apply_residual(
            pair, add_attention, dim=dim, dropout=self.dropout, mask=pair_mask, columns=not by_row
        )

    def bias(self, pair: Tensor) -> Tensor:
        """Return the bias of the logits ``[*, H, N, N]`` from ``pair [*, N, N, c_z]``, for attention along its rows."""
        _, parameters = self.collected(self.kernel_parameters)
        return kernels.pair_bias(pair, *parameters, aligned=self.starting)

    def kernel_parameters(self) -> tuple[kernels.GatedAttentionParams, tuple[Tensor, Tensor, Tensor]]:
        """Return the parameters of :func:`fastfold.kernels.gated_attention` and of its pair bias."""
        of_bias = self.norm.weight, self.norm.bias, self.pair_bias.weight
        return kernel_parameters(self.norm, self.attention), of_bias
