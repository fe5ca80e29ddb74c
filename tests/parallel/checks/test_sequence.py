"""A module is compared on parts of a sequence and on the whole before its first call."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan
from fastfold.parallel.checks import sequence as comparison
from fastfold.parallel.checks.sequence import MAX_POSITIONS, SequenceComparison
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.sequence_parallel.module import SequenceParallel
from fastfold.utils.module_structure import detached_copy
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


class _Changing(nn.Module):
    """A module whose operators depend on the call, on the length or on training."""

    def __init__(self, when: Callable[[_Changing, Tensor], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.when, self.calls, self.seen = when, 0, [0]
        self.attention, self.conv, self.drop = (
            _Attention(False),
            nn.Conv1d(8, 8, 3, padding=1),
            nn.Dropout(0.5),
        )
        self.register_buffer("count", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        x = self.drop(x + self.conv(x.mT).mT if self.when(self, x) else x)
        return x + self.attention(x, None, None)


def _changed_later() -> None:
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    refusal = r"aten\.convolution in conv \(Conv1d\) sees only this rank's part of the sequence"

    def call(sequence: SequenceParallel, length: int = 7) -> None:
        x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
        sequence(sequence.shard(x, 1)).square().sum().backward()

    sequence = _parallel(_Changing(lambda m, x: m.calls > 2), group)
    call(sequence)
    call(sequence)
    with pytest.raises(ConfigError, match=refusal):
        call(sequence)
    sequence = _parallel(_Changing(lambda m, x: m.calls == 2), group)
    call(sequence)
    with pytest.raises(ConfigError, match=r"ran aten\.convolution.* and does not when the call is repeated"):
        call(sequence)
    sequence = _parallel(_Changing(lambda m, x: x.shape[1] > 4), group)
    call(sequence, 4)
    with pytest.raises(ConfigError, match=refusal):
        call(sequence, 12)
    sequence = _parallel(_Changing(lambda m, x: not m.training), group)
    call(sequence)
    sequence.module.eval()
    with pytest.raises(ConfigError, match=refusal), torch.no_grad():
        call(sequence)


def test_a_path_that_begins_later_is_compared_when_it_does() -> None:
    """At a later call, at a new length, in evaluation; a path of one call alone cannot be compared."""
    launch(_changed_later, 2)


def _counted() -> Any:
    compare = SequenceComparison.compare
    return mock.patch.object(SequenceComparison, "compare", autospec=True, side_effect=compare)


def _compared_once() -> None:
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    model = _Changing(lambda m, x: False)
    sequence = _parallel(model, group)
    before = torch.get_rng_state()
    with mock.patch.object(
        SequenceComparison, "compare", autospec=True, side_effect=SequenceComparison.compare
    ) as made:
        for length in (7, 9, 7, 9, 7):
            x = torch.randn(
                2, length, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float64
            )
            sequence(sequence.shard(x, 1)).square().sum().backward()
    assert made.call_count == 2
    assert (model.calls, float(model.count)) == (5, 5.0)
    # The generator has drawn for the calls alone.
    found = torch.rand(3)
    torch.set_rng_state(before)
    for length in (7, 9, 7, 9, 7):
        nn.functional.dropout(X.new_ones(2, (length + 1 - group.rank) // 2, 8))
    assert torch.equal(found, torch.rand(3))
    # A long sequence is shortened for the comparison, and its calls are not compared again.
    with mock.patch.object(comparison, "MAX_POSITIONS", 6):
        sequence = _parallel(_Changing(lambda m, x: False), group)
        with mock.patch.object(
            SequenceComparison, "compare", autospec=True, side_effect=SequenceComparison.compare
        ) as made:
            for _ in range(3):
                sequence(sequence.shard(x, 1))
        assert made.call_count == 1
        sequence = _parallel(_Changing(lambda m, x: True), group)
        with pytest.raises(ConfigError, match=r"aten\.convolution in conv"):
            sequence(sequence.shard(X, 1))


def test_a_length_is_compared_once_and_leaves_nothing_behind() -> None:
    launch(_compared_once, 2)


def _alone() -> str:
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    sequence = _parallel(_Changing(lambda m, x: group.rank == 1 and m.calls > 1), group)
    sequence(sequence.shard(X, 1))
    try:
        with mock.patch.object(comparison, "_WAIT", timedelta(seconds=0.5)):
            sequence(sequence.shard(X, 1))
    except ConfigError as error:
        return str(error)
    return ""


def test_an_operator_of_one_rank_alone_is_refused_there() -> None:
    """The other rank does not wait for a comparison."""
    first, second = launch(_alone, 2)
    assert first == ""
    assert re.search(
        "ran aten.convolution.* on rank 1 of sp for the first time and not on all others", second
    )


def test_one_rank_has_nothing_to_compare() -> None:
    def lay_out(sizes: object) -> Any:
        raise AssertionError

    SequenceComparison(Group(None), lay_out, list).compare(nn.Identity(), (X,), {}, [7])


def test_masks_keep_the_keys_of_the_shortened_parts() -> None:
    comparing = SequenceComparison(Group(None), lambda sizes: pytest.fail("runs nothing"), list)
    sizes, short = (5, 4), (2, 3)
    mask = torch.arange(18).reshape(2, 9)
    kept = comparing._narrow_keys(mask, None, sizes, short)
    assert kept.tolist() == [[0, 1, 5, 6, 7], [9, 10, 14, 15, 16]]
    # Keys of this rank's positions, of another number, and of no rows are as they were.
    for x, known in ((mask, 1), (mask[:, :8], None), (mask[0], None)):
        assert comparing._narrow_keys(x, known, sizes, short) is x


@pytest.mark.parametrize(
    ("known", "length", "missing"),
    [
        ({("add", 1), ("mul", 1)}, MAX_POSITIONS, set()),
        ({("add", 2), ("mul", 1)}, MAX_POSITIONS, {("add", 1)}),
        ({("add", 2), ("mul", 1)}, MAX_POSITIONS + 1, set()),
        ({("add", 2)}, MAX_POSITIONS + 1, {("mul", 1)}),
        (set(), MAX_POSITIONS + 1, {("add", 1), ("mul", 1)}),
    ],
)
def test_a_shortened_sequence_compares_operators_by_name(
    known: set[Any], length: int, missing: set[Any]
) -> None:
    assert comparison._missing({("add", 1), ("mul", 1)}, known, [length - 2, 2]) == missing
