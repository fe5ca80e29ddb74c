"""Dropout and attention are traced as the kernels of a GPU, not as a CPU takes them apart."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from fastfold.parallel.planner.gpu_kernels import gpu_kernels
from fastfold.parallel.planner.recorder import Recorder

HEADS, TOKENS, CHANNELS = 4, 64, 8


class Attention(nn.Module):
    """Attention of PyTorch with dropout of its scores and of its result."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(HEADS * CHANNELS, HEADS, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, tokens, channels]``."""
        return self.dropout(self.inner(x, x, x, need_weights=False)[0])


def traced(dropout: float) -> tuple[Counter[str], int]:
    x = torch.zeros(2, TOKENS, HEADS * CHANNELS)
    model = Attention(dropout)
    with gpu_kernels():
        region = Recorder(model).record(lambda m: m(x).sum(), []).regions[""]
    names = Counter[str]()
    for part in (region.forward, region.backward):
        for operation, number in part.operations.items():
            names[operation.name.removeprefix("aten::")] += number
    return names, region.kept


def test_attention_with_dropout_is_one_kernel_in_each_direction() -> None:
    """And keeps no matrix of scores; dropout adds one kernel and a mask of one byte an element."""
    without, kept = traced(0.0)
    names, kept_too = traced(0.1)
    attention = [name for name in names if "attention" in name]
    assert len(attention) == 2
    assert sum(names[name] for name in attention) == 2
    extra = names - without
    assert extra == Counter({"native_dropout": 1, "native_dropout_backward": 1})
    assert not without - names
    scores = 4 * 2 * HEADS * TOKENS * TOKENS
    assert kept_too - kept == 2 * TOKENS * HEADS * CHANNELS < scores


def test_functions_are_restored() -> None:
    before = F.dropout, F.scaled_dot_product_attention
    try:
        with gpu_kernels():
            assert F.dropout is not before[0]
            raise RuntimeError
    except RuntimeError:
        pass
    assert (F.dropout, F.scaled_dot_product_attention) == before
    with gpu_kernels():
        assert torch.equal(F.dropout(torch.ones(3), 0.5, training=False), torch.ones(3))
