"""Attention within the MSA: along rows with pair bias, along columns, and global along columns."""

from __future__ import annotations

from functools import partial

from ml_collections import ConfigDict
from torch import Tensor

from fastfold import kernels
from fastfold.errors import ConfigError
from fastfold.evoformer.attention import Attention, GlobalAttention, kernel_parameters, self_attention
from fastfold.evoformer.execution import Block, PolicyModule
from fastfold.evoformer.primitives import LayerNorm, Linear, SharedDropout


class MSARowAttention(PolicyModule):
    """Row-wise gated self-attention with pair bias (supplement Algorithm 7), as a residual update.

    - Line 1: the MSA is normalised.
    - Lines 2 and 4: queries, keys, values and gate are projected from it.
    - Line 3: the bias of each head is projected from the normalised pair, for all sequences alike.
    - Lines 5-7: each sequence attends along its residues; see :class:`~fastfold.evoformer.attention.Attention`.
    - Algorithm 6, line 2: the result is added with dropout factors that all sequences share.
    """

    operator = "MSA attention"

    def __init__(self, config: ConfigDict, c_m: int, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.pair_norm = LayerNorm(c_z)
        self.pair_bias = Linear(c_z, config.num_head, bias=False)
        self.attention = Attention.of_node(config, c_m, zero_init=zero_init)
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-3)

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``msa + dropout_rowwise(attention(norm(msa), pair))``, ``[*, S, N, c_m]``.

        The pair is ``[*, N, N, c_z]``, and ``msa_mask [*, S, N]`` is 0 for padding. ``bias`` is a precomputed
        :meth:`bias` of the pair.
        """
        (parameters, of_bias), heads = self.collected(self.kernel_parameters), self.attention.heads
        if bias is None:
            bias = kernels.pair_bias(pair, *of_bias, aligned=True)
        else:  # laid out here, so that blocks do not each copy the bias
            bias = kernels.attention_bias(bias, parameters.query_weight.shape[0] // heads)
        add_attention = partial(self_attention, parameters, heads, bias=bias)
        return self.apply_residual(msa, add_attention, dim=-3, dropout=self.dropout, mask=msa_mask)

    def bias(self, pair: Tensor) -> Tensor:
        """Return the bias of the logits ``[*, H, N, N]`` from ``pair [*, N, N, c_z]``."""
        _, parameters = self.collected(self.kernel_parameters)
        return kernels.pair_bias(pair, *parameters, aligned=True)

    def kernel_parameters(self) -> tuple[kernels.GatedAttentionParams, tuple[Tensor, Tensor, Tensor]]:
        """Return the parameters of :func:`fastfold.kernels.gated_attention` and of its pair bias."""
        of_bias = self.pair_norm.weight, self.pair_norm.bias, self.pair_bias.weight
        return kernel_parameters(self.norm, self.attention), of_bias


class MSAColumnAttention(PolicyModule):
    """Column-wise gated self-attention (supplement Algorithm 8), as a residual update.

    - Line 1: the MSA is normalised.
    - Lines 2-3: queries, keys, values and gate are projected from it.
    - Lines 4-6: each residue attends along the sequences; see :class:`~fastfold.evoformer.attention.Attention`.
    - Algorithm 6, line 3: the result is added.
    """

    operator = "MSA attention"

    def __init__(self, config: ConfigDict, c_m: int, *, zero_init: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = Attention.of_node(config, c_m, zero_init=zero_init)
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-2)

    def forward(self, msa: Tensor, msa_mask: Tensor) -> Tensor:
        """Return ``msa + dropout_columnwise(attention(norm(msa)))``, ``[*, S, N, c_m]``; mask ``[*, S, N]``."""
        parameters, heads = self.collected(self.kernel_parameters), self.attention.heads
        add_attention = partial(self_attention, parameters, heads, bias=None)
        return self.apply_residual(
            msa, add_attention, dim=-2, dropout=self.dropout, mask=msa_mask, columns=True
        )

    def kernel_parameters(self) -> kernels.GatedAttentionParams:
        """Return the parameters of :func:`fastfold.kernels.gated_attention`."""
        return kernel_parameters(self.norm, self.attention)


class MSAColumnGlobalAttention(PolicyModule):
    """Global column attention of the extra MSA stack (supplement Algorithm 19), as a residual update.

    - Line 1: the MSA is normalised.
    - Lines 2-7: each residue attends along the sequences with one query per head; see
      :class:`~fastfold.evoformer.attention.GlobalAttention`.
    - Algorithm 18, line 3: the result is added.
    """

    operator = "MSA attention"

    def __init__(self, config: ConfigDict, c_e: int, *, zero_init: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(c_e)
        self.attention = GlobalAttention(
            c_e, heads=config.num_head, gating=config.gating, zero_init=zero_init
        )
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-2)

    def forward(self, msa: Tensor, msa_mask: Tensor) -> Tensor:
        """Return ``msa + dropout_columnwise(attention(norm(msa)))``, ``[*, S, N, c_e]``; mask ``[*, S, N]``."""
        if msa_mask is None:
            raise ConfigError("msa_mask must be a tensor, found None; give ones without padding")

        def add_attention(block: Block) -> Tensor:
            assert block.mask is not None
            return block.add(self.attention(self.norm(block.x), block.mask))

        return self.apply_residual(
            msa, add_attention, dim=-2, dropout=self.dropout, mask=msa_mask, columns=True
        )
