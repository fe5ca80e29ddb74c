"""Gated multi-head attention over rows: the projections around :func:`fastfold.kernels.attention`."""

from __future__ import annotations

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from fastfold import kernels
from fastfold.evoformer.execution import Block
from fastfold.evoformer.primitives import LayerNorm, Linear


class Attention(nn.Module):
    """Multi-head attention along one axis, with optional pair bias and sigmoid gate.

    Supplement Algorithms 7, 8, 13, 14 and 17 share these steps after their layer norms. Lines of Algorithm 7:

    - Line 2: queries, keys and values are projected without biases.
    - Line 4: a sigmoid gate is projected from the queries' input.
    - Line 5: logits are scaled by ``1 / sqrt(c)``, the bias is added, and a softmax goes over the keys.
    - Line 6: the values are averaged with these weights and gated.
    - Line 7: all heads together are projected to the output.

    ``c_hidden`` counts the channels of all heads together.
    """

    def __init__(
        self, c_q: int, c_kv: int, c_out: int, *, heads: int, c_hidden: int, gating: bool, zero_init: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(c_q, c_hidden, bias=False, init="glorot", heads=heads)
        self.key = Linear(c_kv, c_hidden, bias=False, init="glorot", heads=heads)
        self.value = Linear(c_kv, c_hidden, bias=False, init="glorot", heads=heads)
        self.gate = Linear(c_q, c_hidden, init="gating") if gating else None
        self.output = Linear(c_hidden, c_out, init="final" if zero_init else "glorot")

    @classmethod
    def of_node(
        cls, config: ConfigDict, c: int, c_hidden: int | None = None, *, zero_init: bool
    ) -> Attention:
        """Return self-attention of ``c`` channels by an official config node (``num_head``, ``gating``)."""
        heads, gating = config.num_head, config.gating
        return cls(c, c, c, heads=heads, c_hidden=c_hidden or c, gating=gating, zero_init=zero_init)

    def forward(self, x_q: Tensor, x_kv: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        """Attend within each row; return ``[*, R, N_q, c_out]``.

        Queries come from ``x_q [*, R, N_q, c_q]``, keys and values from ``x_kv [*, R, N_k, c_kv]``. The ``bias [*, H,
        N_q, N_k]`` is added to the logits of every row; the ``mask [*, R, N_k]`` is 0 for keys that must not be seen.
        """
        split = (self.heads, -1)
        q = self.query(x_q).unflatten(-1, split)
        k = self.key(x_kv).unflatten(-1, split)
        v = self.value(x_kv).unflatten(-1, split)
        gate = None if self.gate is None else self.gate(x_q).unflatten(-1, split)
        return self.output(kernels.attention(q, k, v, bias, mask, gate).flatten(-2))


def self_attention(
    parameters: kernels.GatedAttentionParams,
    heads: int,
    block: Block,
    bias: Tensor | None,
) -> Tensor:
    """Compute ``x + dropout * attention(norm(x))`` of a block ``[*, R, N, c]`` along its rows in one operator.

    Supplement Algorithms 7, 8, 13 and 14. The parameters are those of :func:`kernel_parameters`. The ``bias [*, H, N,
    N]`` is added to the logits of every row. The block's mask is 0 for keys that must not be seen.
    """
    return kernels.gated_attention(
        block.x,
        bias,
        block.mask,
        parameters,
        heads=heads,
        residual=block.x,
        dropout=block.dropout,
        out=block.out,
        at_once=block.policy.attention_at_once,
        keep=block.policy.keep_projections,
    )


def kernel_parameters(norm: LayerNorm, attention: Attention) -> kernels.GatedAttentionParams:
    """Return the parameters of :func:`fastfold.kernels.gated_attention`."""
    gate = attention.gate
    return kernels.GatedAttentionParams(
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        query_weight=attention.query.weight,
        key_weight=attention.key.weight,
        value_weight=attention.value.weight,
        gate_weight=None if gate is None else gate.weight,
        gate_bias=None if gate is None else gate.bias,
        output_weight=attention.output.weight,
        output_bias=attention.output.bias,
    )


class GlobalAttention(nn.Module):
    """Attention with one averaged query per row and one key and value head (supplement Algorithm 19).

    - Line 2: each position has one key and one value, which all heads share.
    - Line 3: the input is averaged over the row before it is projected to queries, which is the same as after.
    - Line 4: a sigmoid gate is projected from every position.
    - Lines 5-6: each head attends once per row, and every position of the row has its own gate.
    - Line 7: all heads together are projected to the output.
    """

    def __init__(self, c: int, *, heads: int, gating: bool, zero_init: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(c, c, bias=False, init="glorot", heads=heads)
        self.key = Linear(c, c // heads, bias=False, init="glorot")
        self.value = Linear(c, c // heads, bias=False, init="glorot")
        self.gate = Linear(c, c, init="gating") if gating else None
        self.output = Linear(c, c, init="final" if zero_init else "glorot")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend within each row of ``x [*, R, N, c]`` under ``mask [*, R, N]``; return ``[*, R, N, c]``."""
        weight = mask.unsqueeze(-1)
        average = (x * weight).sum(-2, keepdim=True) / (weight.sum(-2, keepdim=True) + 1e-10)
        average = average.to(x.dtype)  # float32 masks promote 16-bit activations
        # All heads read one key and value, so they are queries of one head: [*, R, H, 1, D] to [*, R, N, 1, D].
        q = self.query(average).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        k, v = self.key(x).unsqueeze(-2), self.value(x).unsqueeze(-2)
        attended = kernels.attention(q, k, v, None, mask).transpose(-3, -2).flatten(-2)
        if self.gate is not None:
            attended = torch.sigmoid(self.gate(x)) * attended
        return self.output(attended.expand(*x.shape[:-1], -1))
