"""Leaves out every reduction of a computation in turn, to see that something notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comm.moves import Box, BoxMove, Move

REDUCTIONS = ("start_all_reduce", "start_reduce_scatter", "start_reduce")
# Of a ring that adds up as it goes: what has been added so far is passed on.
SHIFTS = ("start_shift",)
# From one layout of boxes to another, as between the rows around a grid and its blocks.
MOVES = ("start_redistribute",)


def _local(name: str, args: tuple[object, ...]) -> AsyncResult[Tensor]:
    """What a rank would go on with if the reduction were forgotten: its own term, or its own part of what is moved."""
    x = args[0]
    assert isinstance(x, Tensor)
    if name == "start_redistribute":
        return completed(_own_part(*args))  # type: ignore[arg-type]
    if name == "start_shift":
        _, offset, group, dim, sizes = args
        assert isinstance(offset, int)
        assert isinstance(group, Group)
        assert isinstance(dim, int)
        assert isinstance(sizes, list)
        shape = list(x.shape)
        shape[dim] = sizes[(group.rank - offset) % group.size]
        return completed(x.new_zeros(shape))
    if name != "start_reduce_scatter":
        return completed(x.clone())
    _, dim, group, sizes = args
    assert isinstance(dim, int)
    assert isinstance(group, Group)
    assert isinstance(sizes, list)
    return completed(x.split(sizes, dim)[group.rank])


def _own_part(
    x: Tensor, dims: Sequence[int], source: Sequence[Box], target: Sequence[Box], group: Group
) -> Tensor:
    """The box that a rank gets, zero but for what it had already."""
    move = BoxMove(dims, source, target, group.rank)
    received = [x.new_zeros(shape) for shape in move.shapes(x, group.rank)]
    received[group.rank] = move.pieces(x)[group.rank]
    return move.join(received)


Reduction = tuple[str, int]
"""Name of a group, and which of the reductions over it."""


@contextmanager
def _without(
    left_out: Reduction | None, names: tuple[str, ...] = REDUCTIONS, apart: bool = False
) -> Iterator[dict[Reduction, str]]:
    """Forget one reduction, or none. Gives the functions that the reductions call, as they are called.

    Args:
        left_out: Which one; ranks that are in no such group forget none.
        names: Functions of :mod:`fastfold.parallel.comm.async_ops`.
        apart: Whether groups of one name are told apart by their ranks.
    """
    originals = {name: getattr(async_ops, name) for name in names}
    calls: dict[Reduction, str] = {}
    counts: Counter[str] = Counter()

    def wrapped(name: str) -> Callable[..., AsyncResult[Tensor]]:
        def reduction(*args: object) -> AsyncResult[Tensor]:
            group = next(arg for arg in args if isinstance(arg, Group))
            if group.size == 1:  # nothing is sent
                return originals[name](*args)
            of_whom = f" of ranks {dist.get_process_group_ranks(group.process_group)}" if apart else ""
            this = group.name + of_whom, counts[group.name]
            counts[group.name] += 1
            calls[this] = name
            return _local(name, args) if this == left_out else originals[name](*args)

        return reduction

    exchange = async_ops._start_exchange

    def exchanged(moves: Sequence[tuple[Tensor, Move]], group: Group) -> list[AsyncResult[Tensor]]:
        """Several tensors in one message, some of them terms of sums."""
        found = exchange(moves, group)
        for place, (x, move) in enumerate(moves):
            if len(moves) > 1 and move.before is None:  # one alone is start_reduce_scatter's
                this = group.name, counts[group.name]
                counts[group.name] += 1
                calls[this] = "exchange"
                if this == left_out:
                    found[place] = completed(move.pieces(x)[group.rank].contiguous())
        return found

    for name in names:
        setattr(async_ops, name, wrapped(name))
    if "start_reduce_scatter" in names:
        async_ops._start_exchange = exchanged
    try:
        yield calls
    finally:
        async_ops._start_exchange = exchange
        for name, start in originals.items():
            setattr(async_ops, name, start)


def undetected_reductions(
    difference: Callable[[], float],
    threshold: float = 1e-9,
    names: tuple[str, ...] = REDUCTIONS,
    apart: bool = False,
) -> tuple[int, list[str]]:
    """Run a comparison without each of its reductions, on all ranks of the default group together.

    Args:
        difference: Computes and gives this rank's largest difference from what is right. The ranks of a group call
            the same collectives in the same order.
        threshold: A difference above it is noticed.
        names: Functions of :mod:`fastfold.parallel.comm.async_ops` that are left out.
        apart: Leave it out of one group at a time, as where groups run different programs, rather than of all groups
            of its name.

    Returns:
        The number of reductions in one run, and those without which no rank notices anything.
    """
    with _without(None, names, apart) as calls:
        assert difference() < threshold
    everywhere: list[dict[Reduction, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, calls)
    found = {key: name for of_one in everywhere for key, name in of_one.items()}
    undetected = []
    for key, name in sorted(found.items()):
        with _without(key, names, apart):
            noticed = torch.tensor(float(not difference() < threshold))
        dist.all_reduce(noticed)
        if noticed.item() == 0:
            group, number = key
            undetected.append(f"{number}: {name} over {group}")
    return len(found), undetected
