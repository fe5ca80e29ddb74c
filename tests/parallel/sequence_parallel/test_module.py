"""PyTorch's attention is computed as attention over the ranks, here of a group of one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fastfold.parallel import Group
from fastfold.parallel.sequence_parallel.module import _SequenceAttention

POSITIONS, BATCH, HEADS, WIDTH = 7, 2, 3, 12


def over_one_rank(positions: int, method: str) -> _SequenceAttention:
    """Return the replacement of PyTorch's attention of a module on one rank."""
    sequence: Any = SimpleNamespace(
        group=Group(None),
        _sizes=lambda: [positions],
        _comparison=SimpleNamespace(paused=nullcontext),
        is_whole=False,
        method=method,
    )
    return _SequenceAttention(sequence)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_batch", [False, True])
def test_multihead_attention_equals_pytorchs(method: str, masked: bool, with_batch: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
    x = torch.randn(POSITIONS, BATCH, WIDTH, dtype=torch.float64)
    x = x if with_batch else x[:, 0]
    mask = torch.rand(POSITIONS, POSITIONS) < 0.3 if masked else None
    if mask is not None:
        mask.fill_diagonal_(False)
    expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    with over_one_rank(POSITIONS, method) as attention:
        result, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    assert attention.calls == 1
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_products_equal_pytorchs_with_fewer_heads_of_keys(method: str, is_causal: bool) -> None:
    torch.manual_seed(1)
    q = torch.randn(BATCH, 4, POSITIONS, 5, dtype=torch.float64)
    k, v = torch.randn(2, BATCH, 2, POSITIONS, 5, dtype=torch.float64)

    def attended() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)

    expected = attended()
    with over_one_rank(POSITIONS, method):
        result = attended()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
