"""Collectives against what one process computes: values, gradients, uneven shards, overlap, bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm import collectives as c
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.comm.moves import Move, Shards
from tests.helpers.spawn_ranks import BACKENDS, launch

TOLERANCE = 1e-12


def _close(name: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{name}: {m}")


def _random(*shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _run(
    name: str,
    group: Group,
    inputs: list[Tensor],
    collective: Callable[[Tensor], Tensor],
    plain: Callable[[list[Tensor]], list[Tensor]],
    relayout: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
) -> None:
    """Compare with ``plain``, which maps all ranks' inputs to all ranks' outputs in one process.

    Each rank's loss weighs its output differently, so a gradient that is taken from one rank instead of all is seen.
    """
    own = relayout(inputs[group.rank]).detach().requires_grad_()
    y = collective(own)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = plain(leaves)
    _close(name, y, expected[group.rank])
    weights = [_random(*out.shape, seed=50 + rank) for rank, out in enumerate(expected)]
    y.backward(relayout(weights[group.rank]))
    torch.stack([(out * w).sum() for out, w in zip(expected, weights, strict=True)]).sum().backward()
    # None where the leaf takes no part, as the broadcast's other ranks.
    grad = leaves[group.rank].grad
    grad = torch.zeros_like(own) if grad is None else grad
    assert own.grad is not None
    _close(f"gradient of {name}", own.grad, grad)


def _transposed(x: Tensor) -> Tensor:
    """The same numbers, the last dimension outermost in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _with_gaps(x: Tensor) -> Tensor:
    """The same numbers, each behind another one that is none."""
    return torch.stack([torch.full_like(x, torch.nan), x], -1)[..., 1]


RELAYOUTS: list[Callable[[Tensor], Tensor]] = [torch.Tensor.contiguous, _transposed, _with_gaps]


def _axis_against_one_process(group: Group, length: int, relayout: Callable[[Tensor], Tensor]) -> None:
    """Collectives along an axis of which the ranks have shards, evenly and unevenly cut, and empty ones."""
    size, run = group.size, partial(_run, relayout=relayout)
    sizes = shard_sizes(length, size)
    whole = _random(3, length, 2)
    shards = list(whole.split(sizes, 1))
    terms = [_random(3, length, 2, seed=rank) for rank in range(size)]
    run(
        f"gather {length}",
        group,
        shards,
        lambda x: c.gather(x, 1, group, sizes),
        lambda all_: [torch.cat(all_, 1)] * size,
    )
    run(
        f"reduce_scatter {length}",
        group,
        terms,
        lambda x: c.reduce_scatter(x, 1, group),
        lambda all_: list(torch.stack(all_).sum(0).split(sizes, 1)),
    )
    run(
        f"all_to_all {length}",
        group,
        [_random(3, length + 2, part, seed=rank) for rank, part in enumerate(sizes)],
        lambda x: c.all_to_all(x, 1, -1, group, concat_sizes=sizes),
        lambda all_: list(torch.cat(all_, 2).split(shard_sizes(length + 2, size), 1)),
    )


def _exchange(group: Group, length: int, dtype: torch.dtype, relayout: Callable[[Tensor], Tensor]) -> None:
    """Three moves in one message each way, against the collectives one by one; ``dtype`` is that of one of them."""
    sizes = shard_sizes(length, group.size)
    pair = _random(length, sizes[group.rank], 3, seed=group.rank)
    terms = _random(2, length, seed=10 + group.rank).to(dtype)
    bias, constant = _random(sizes[group.rank], 5, seed=20), _random(sizes[group.rank], seed=30)
    rows, columns = Shards(0, sizes), Shards(1, sizes)
    moves = [Move(columns, rows), Move(None, columns), Move(rows, None), Move(rows, None)]
    one_by_one = [
        lambda x: c.all_to_all(x, 0, 1, group, split_sizes=sizes, concat_sizes=sizes),
        lambda x: c.reduce_scatter(x, 1, group, sizes),
        lambda x: c.gather(x, 0, group, sizes),
        lambda x: c.gather(x, 0, group, sizes),
    ]
    inputs = [relayout(x).requires_grad_() for x in (pair, terms, bias)] + [constant]
    apart = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    with group.reporter.record() as log:
        found = c.exchange_async(list(zip(inputs, moves, strict=True)), group).wait()
        weights = [_random(*y.shape, seed=40 + group.rank).to(y.dtype) for y in found]
        torch.autograd.backward(found[:3], weights[:3])
    assert [entry.op for entry in log.entries] == ["all_to_all"] * 2
    for name, x, y, alone, weight, single in zip(
        "abcd", inputs, found, apart, weights, one_by_one, strict=True
    ):
        expected = single(alone)
        _close(f"{name} of an exchange of {length}", y, expected)
        if x.requires_grad:
            expected.backward(weight)
            assert x.grad is not None
            assert alone.grad is not None
            _close(f"gradient of {name} of an exchange of {length}", x.grad, alone.grad)


def _without_an_axis(group: Group, relayout: Callable[[Tensor], Tensor]) -> None:
    """Collectives of whole tensors."""
    size = group.size
    terms = [_random(5, 2, seed=rank) for rank in range(size)]
    _run(
        "broadcast",
        group,
        terms,
        lambda x: c.broadcast(x, 1, group),
        lambda all_: [all_[1]] * size,
        relayout,
    )
    _run(
        "all_reduce both ways",
        group,
        terms,
        lambda x: c.all_reduce_gradient(c.all_reduce(x, group), group),
        lambda all_: [torch.stack(all_).sum(0)] * size,
        relayout,
    )


def _in_lower_precision(size: int) -> None:
    """Sums of bfloat16 and float32 are rounded a few times, and what is only moved stays as it is to the last bit."""
    group = Group(dist.group.WORLD)
    sizes = shard_sizes(2 * size + 1, size)
    for dtype in (torch.bfloat16, torch.float32):
        terms = [_random(2 * size + 1, 6, seed=rank).to(dtype) for rank in range(size)]
        exact = torch.stack(terms).double().sum(0)
        bound = size * torch.finfo(dtype).eps * exact.abs().max().item()
        for name, found in (
            ("all_reduce", c.all_reduce(terms[group.rank], group)),
            ("reduce_scatter", c.gather(c.reduce_scatter(terms[group.rank], 0, group), 0, group, sizes)),
        ):
            assert found.dtype == dtype
            assert (found.double() - exact).abs().max() <= bound, f"{name} of {dtype}"
        own = terms[0][group.shard(len(terms[0]))]
        assert torch.equal(c.gather(own, 0, group, sizes), terms[0])
        columns = c.all_to_all(own, 1, 0, group, concat_sizes=sizes)
        assert torch.equal(columns, terms[0].split(shard_sizes(6, size), 1)[group.rank])
        assert torch.equal(c.broadcast(terms[group.rank], 1, group), terms[1])


def _against_one_process(size: int) -> None:
    group = Group(dist.group.WORLD)
    for relayout in RELAYOUTS:
        for length in (size * 2, size * 2 + 1, size - 1):
            _axis_against_one_process(group, length, relayout)
            for dtype in (torch.float64, torch.float32):
                _exchange(group, length, dtype, relayout)
        _without_an_axis(group, relayout)
    same = _random(5, 2)
    terms = [_random(5, 2, seed=rank) for rank in range(size)]

    # Conjugate forms: the gradients of each alone.
    x = same.clone().requires_grad_()
    y = c.all_reduce(x, group)
    _close("g", y, same * size)
    y.backward(terms[group.rank])
    assert x.grad is not None
    _close("gradient of g", x.grad, terms[group.rank])
    x = same.clone().requires_grad_()
    y = c.all_reduce_gradient(x, group)
    _close("f", y, same)
    y.backward(terms[group.rank])
    assert x.grad is not None
    _close("gradient of f", x.grad, torch.stack(terms).sum(0))

    own = same[group.shard(5)].clone().requires_grad_()
    c.gather(own * 2, 0, group, shard_sizes(5, size), same_after=True).backward(terms[0])
    assert own.grad is not None
    _close("gradient of a gather", own.grad, 2 * terms[0][group.shard(5)])
    assert c.exchange_sizes(group.rank * 3, group, same.device) == [rank * 3 for rank in range(size)]


class _Spy(dist.Work):
    """Notes when a collective is waited for."""

    def __init__(self, work: dist.Work, name: str, events: list[str]) -> None:
        super().__init__()
        self.work_, self.name_, self.events = work, name, events

    def wait(self, *args: object) -> bool:
        self.events.append(f"wait for {self.name_}")
        return self.work_.wait()


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events  # type: ignore[attr-defined]
        events.append("compute")
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("compute backward")  # type: ignore[attr-defined]
        return gradient * 2, None


def _spied(name: str, events: list[str]) -> Callable[..., Any]:
    start = getattr(async_ops, name)

    def spied(*args: object) -> Any:
        events.append(name)
        found = start(*args)
        for pending in found if isinstance(found, list) else [found]:
            pending.work = _Spy(pending.work, name, events)
        return found

    return spied


def _overlap() -> None:
    group, events = Group(dist.group.WORLD), list[str]()
    cases: list[tuple[Callable[[Tensor], AsyncResult[Tensor]], str, str]] = [
        (lambda x: c.gather_async(x, 0, group), "start_gather", "start_reduce_scatter"),
        (lambda x: c.all_to_all_async(x, 0, 1, group), "_start_exchange", "_start_exchange"),
    ]
    for start, forward, backward in cases:
        for name in {forward, backward}:
            setattr(async_ops, name, _spied(name, events))
        events.clear()
        x, other = _random(4, 4).requires_grad_(), _random(4, 4, seed=1).requires_grad_()
        handle = start(x)
        z = _Compute.apply(other, events)
        y = handle.wait()
        (y.sum() * z.sum()).backward()
        assert events == [
            forward, "compute", f"wait for {forward}", backward, "compute backward", f"wait for {backward}",
        ], events  # fmt: skip
        # A second handle's life does not disturb the first's: no state outside the handles.
        first, second = start(x), start(2 * x)
        _close("two handles", second.wait(), 2 * first.wait())


def _bytes(size: int) -> None:
    group = Group(dist.group.WORLD)
    x = _random(size, 6).requires_grad_()
    n = size * 6 * 8

    def both(function: Callable[[Tensor], Tensor]) -> dict[str, float]:
        with group.reporter.record() as log:
            function(x).sum().backward()
        totals: dict[str, float] = {}
        for entry in log.entries:
            totals[entry.op] = totals.get(entry.op, 0.0) + entry.sent
        return totals

    p = size - 1
    assert both(lambda t: c.gather(t, 0, group)) == {"all_gather": p * n, "reduce_scatter": p * n}
    assert both(lambda t: c.reduce_scatter(t, 0, group)) == {
        "all_gather": p * n / size,
        "reduce_scatter": p * n / size,
    }
    assert both(lambda t: c.all_to_all(t, 0, 1, group)) == {"all_to_all": 2 * p * n / size}
    assert both(lambda t: c.all_reduce(t, group)) == {"all_reduce": 2 * p * n / size}
    assert both(lambda t: c.all_reduce_gradient(t, group)) == {"all_reduce": 2 * p * n / size}
    assert both(lambda t: c.broadcast(t, 0, group)) == {"broadcast": p * n / size, "reduce": p * n / size}
    with group.reporter.record() as outer, group.reporter.record() as inner:
        c.gather(x, 0, group)
    assert outer.sent == inner.sent == p * n
    sizes = shard_sizes(size + 1, size)
    with group.reporter.record() as log:
        c.gather(_random(sizes[group.rank], 6), 0, group, sizes)
    assert log.sent == p * sizes[0] * 6 * 8, "a shard that is one shorter is sent with one more"
    sizes = [3, *[1] * p]
    with group.reporter.record() as log:
        c.gather(_random(sizes[group.rank], 6), 0, group, sizes)
    assert log.sent == p * sizes[group.rank] * 6 * 8, "shards of other lengths are not padded"


def _everything() -> None:
    size = dist.get_world_size()
    _against_one_process(size)
    _in_lower_precision(size)
    _bytes(size)
    _overlap()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_equal_one_process_overlap_and_send_what_they_must(size: int, backend: str) -> None:
    """Even and uneven shards, tensors with gaps and in another order, and lower precision."""
    launch(_everything, size, backend=backend)


def test_a_group_of_one_communicates_nothing() -> None:
    group = Group(None)
    x = _random(3, 4).requires_grad_()
    with group.reporter.record() as log:
        for function in (
            lambda t: c.gather(t, 0, group),
            lambda t: c.reduce_scatter(t, 0, group),
            lambda t: c.all_to_all(t, 0, 1, group),
            lambda t: c.all_reduce(t, group),
            lambda t: c.all_reduce_gradient(t, group),
            lambda t: c.broadcast(t, 0, group),
        ):
            (gradient,) = torch.autograd.grad(function(x).sum(), x)
            _close("gradient", gradient, torch.ones_like(x))
    assert not log.entries


@pytest.mark.parametrize(("length", "parts", "sizes"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])])
def test_the_first_shards_are_one_longer(length: int, parts: int, sizes: list[int]) -> None:
    assert shard_sizes(length, parts) == sizes


def test_shards_that_do_not_fit_are_refused() -> None:
    group, x = Group(None), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="this rank's tensor has 3"):
        c.gather(x, 0, group, [4])
    with pytest.raises(ValueError, match="with a sum of 4"):
        c.reduce_scatter(x, 1, group, [3])
    with pytest.raises(ValueError, match="no dimension 2"):
        c.gather(x, 2, group)
    with pytest.raises(ValueError, match="expected two different dimensions, found"):
        c.all_to_all(x, 1, -1, group)


def test_a_result_is_given_once_and_its_buffers_are_let_go() -> None:
    pending = async_ops.completed(torch.ones(2))
    assert torch.equal(pending.wait(), torch.ones(2))
    with pytest.raises(RuntimeError, match="asked for twice"):
        pending.wait()
