"""A module is compared on parts of a sequence and on the whole before its first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comparison import detached_copy, is_close, without_small_weights
from fastfold.parallel.sequence_parallel.comparison import SequenceComparison
from fastfold.parallel.sequence_parallel.module import SequenceParallel
from tests.helpers.spawn_ranks import launch

X = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class _Attention(nn.Module):
    """Two heads of keys for four of queries; ``rotary`` turns both by given positions or by their place in ``x``."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.q, self.kv, self.output = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, 1)
        if self.rotary:
            places = torch.arange(x.shape[1])[None] if positions is None else positions
            angles = places[:, None, :, None].to(x.dtype) * torch.tensor([1.0, 0.1]).to(x.dtype)
            q, k = (
                torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
                for a, b in (q.chunk(2, -1), k.chunk(2, -1))
            )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Net(nn.Module):
    def __init__(self, more: str = "", rotary: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.more = more
        self.attention = _Attention(rotary)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gate = nn.Parameter(torch.zeros(8))
        self.drop = nn.Dropout(0.2)
        self.double()

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(x, positions, mask)
        if self.more == "conv":
            x = x + self.gate * self.conv(x.mT).mT
        if self.more == "recurrent":
            x = self.recurrent(x)[0]
        if self.more == "second":
            x = x + self.second(x, x, x, need_weights=False)[0]
        if self.more == "mean":
            return x.mean(1)
        if self.more == "roll":
            x = x + x.roll(1, 1)
        return x.square().sum() if self.more == "loss" else self.drop(x)  # type: ignore[no-any-return]


def _parallel(model: nn.Module, group: Group, **more: Any) -> SequenceParallel:
    return SequenceParallel(model, group, attention=_Attention, **more)


def _local_operators() -> None:
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    for more in ("conv", "recurrent", "second", "mean", "roll"):
        sequence = _parallel(_Net(more), group)
        with pytest.raises(ConfigError, match=r"_Net gives another result on parts of a sequence"):
            sequence(sequence.shard(X, 1))
    sequence = _parallel(_Net(rotary=True), group)
    with pytest.raises(ConfigError, match="count positions from first of SequenceParallel"):
        sequence(sequence.shard(X, 1))
    sequence = _parallel(_Net(rotary=True), group, compare_first=False)
    sequence(sequence.shard(X, 1))

    def narrow(x: Tensor) -> Tensor:
        return x.narrow(1, sequence.first, len(own[0]))

    # Positions as an input, heads of keys for several of queries, and a mask of padding.
    plain = _Net(rotary=True).eval()
    positions = torch.arange(3, 10)[None].expand(2, -1)
    padding = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    padding[0, ..., 4:] = False
    for mask in (padding, torch.zeros_like(padding, dtype=X.dtype).masked_fill(~padding, -torch.inf)):
        model = detached_copy(plain)
        model.conv.train()
        sequence = _parallel(model, group)
        own = sequence.shard(X, 1)
        part = mask.narrow(-1, sequence.first, own.shape[1])
        found = sequence(own, sequence.shard(positions, 1), part)
        assert torch.allclose(found, narrow(plain(X, positions, mask)), atol=1e-12)
        assert [name for name, x in model.named_modules() if x.training] == ["conv"]
    sequence = _parallel(_Net("loss"), group)
    sequence(sequence.shard(X, 1))
    sequence = _parallel(_Net(), group)
    sequence.shard(X, 1)
    square = torch.ones(2, len(own[0]), len(own[0]))
    with pytest.raises(ConfigError, match=r"expected one dimension of .* cut it by shard\(x, dim\)"):
        sequence(square)


def test_what_looks_along_the_sequence_and_stays_local_is_refused() -> None:
    """Positions, convolutions (behind a gate of zeros too), recurrent layers, means, unnamed attention, shifts."""
    launch(_local_operators, 2)


def test_one_rank_has_nothing_to_compare() -> None:
    def lay_out(sizes: object) -> Any:
        raise AssertionError

    SequenceComparison(Group(None), lay_out, list).compare(nn.Identity(), (X,), {}, [7])


def test_small_weights_come_back() -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.fill_(1e-5)
        layer.bias.zero_()
    with without_small_weights(layer):
        assert layer.weight.abs().max() > 0.1
        assert layer.bias.any()
    assert torch.equal(layer.weight, torch.full((3, 3), 1e-5))
    assert not layer.bias.any()


def test_copies_of_what_has_a_history_have_none() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    (copied,) = detached_copy([x])
    assert copied.grad_fn is None
    assert is_close(x.detach(), copied)
    assert not is_close(x.detach(), copied + 1)
