"""Small language models with the structures of GPT-2 and of Llama's relatives, without transformers."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 13, 12, 6


class Conv1D(nn.Module):
    """Linear layer with a transposed weight, as GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / math.sqrt(nx))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class JointAttention(nn.Module):
    """Queries, keys and values of one layer, split by an attribute."""

    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = heads, WIDTH // heads, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for t in self.c_attn(x).split(self.split_size, dim=2)
        )
        rate = self.attn_dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))


class PairOfLayers(nn.Module):
    """Perceptron of two transposed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(20, WIDTH), Conv1D(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class JointBlock(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = JointAttention(heads, dropout), PairOfLayers()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class TiedModel(nn.Module):
    """GPT-2: learned positions, and an output layer that is tied to the embedding."""

    def __init__(self, *, heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(JointBlock(heads, dropout) for _ in range(3))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            hidden = block(hidden)
        return {"logits": self.lm_head(self.ln_f(hidden))}


class GroupedAttention(nn.Module):
    """Fewer heads of keys than of queries, and a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.groups = 2, 2
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
        self.q_norm = nn.LayerNorm(2)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q) + angles, k + angles
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class PackedPerceptron(nn.Module):
    """Gate and values of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 18), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class GroupedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = GroupedAttention(), PackedPerceptron()

    def forward(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, None]:
        hidden = hidden + self.self_attn(hidden, angles)
        return hidden + self.mlp(hidden), None


class Rotary(nn.Module):
    """Positions from a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.tensor([1.0, 0.5]), persistent=False)

    def forward(self, like: Tensor) -> Tensor:
        return torch.arange(like.shape[1])[:, None] * self.inverse.to(like.dtype) * 0.1


class Trunk(nn.Module):
    """The model without its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(GroupedBlock() for _ in range(3))
        self.norm, self.rotary = nn.LayerNorm(WIDTH), Rotary()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        angles = self.rotary(hidden)
        for layer in self.layers:
            hidden, _ = layer(hidden, angles)
        return self.norm(hidden)


class PlannedModel(nn.Module):
    """A model that declares how tensor parallelism cuts it, and scales its embedding."""

    tp_plan: ClassVar = {
        "lm_head": "colwise_gather_output",
        "trunk.embed_tokens": "embedding_rowwise",
        "trunk.layers.*.self_attn.q_proj": "colwise",
        "trunk.layers.*.self_attn.k_proj": "colwise",
        "trunk.layers.*.self_attn.v_proj": "colwise",
        "trunk.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "trunk.layers.*.self_attn.o_proj": "rowwise",
        "trunk.layers.*.mlp.gate_up_proj": "packed_colwise",
        "trunk.layers.*.mlp.down_proj": "rowwise",
        "trunk.layers.*.experts.gate": "grouped_gemm",
    }

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.lm_head = Trunk(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.trunk(input_ids))}
