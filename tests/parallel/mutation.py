"""Leaves out every reduction of a computation in turn, to see that something notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.parallel import exchange
from fastfold.parallel.exchange import Pending, ready
from fastfold.parallel.groups import Group

REDUCTIONS = ("start_all_reduce", "start_reduce_scatter", "start_reduce")
# Of a ring that adds up as it goes: what has been added so far is passed on.
SHIFTS = ("start_shift",)


def _local(name: str, args: tuple[object, ...]) -> Pending:
    """What a rank would go on with if the reduction were forgotten: its own term."""
    x = args[0]
    assert isinstance(x, Tensor)
    if name == "start_shift":
        _, offset, group, dim, sizes = args
        assert isinstance(offset, int)
        assert isinstance(group, Group)
        assert isinstance(dim, int)
        assert isinstance(sizes, list)
        shape = list(x.shape)
        shape[dim] = sizes[(group.rank - offset) % group.size]
        return ready(x.new_zeros(shape))
    if name != "start_reduce_scatter":
        return ready(x.clone())
    _, dim, group, sizes = args
    assert isinstance(dim, int)
    assert isinstance(group, Group)
    assert isinstance(sizes, list)
    return ready(x.split(sizes, dim)[group.rank])


@contextmanager
def _without(number: int, names: tuple[str, ...] = REDUCTIONS) -> Iterator[list[str]]:
    """Every rank forgets its reduction ``number``; -1 forgets none. Gives the reductions as they are called."""
    originals = {name: getattr(exchange, name) for name in names}
    calls: list[str] = []

    def wrapped(name: str) -> Callable[..., Pending]:
        def reduction(*args: object) -> Pending:
            group = next(arg for arg in args if isinstance(arg, Group))
            calls.append(f"{len(calls)}: {name} over {group.name}")
            return _local(name, args) if len(calls) - 1 == number else originals[name](*args)

        return reduction

    for name in names:
        setattr(exchange, name, wrapped(name))
    try:
        yield calls
    finally:
        for name, start in originals.items():
            setattr(exchange, name, start)


def undetected_reductions(
    difference: Callable[[], float], threshold: float = 1e-9, names: tuple[str, ...] = REDUCTIONS
) -> tuple[int, list[str]]:
    """Run a comparison without each of its reductions, on all ranks of the default group together.

    Args:
        difference: Computes and gives this rank's largest difference from what is right. Every rank has to call
            the same collectives in the same order.
        threshold: A difference above it is noticed.
        names: Functions of :mod:`fastfold.parallel.exchange` that are left out.

    Returns:
        The number of reductions in one run, and those without which no rank notices anything.
    """
    with _without(-1, names) as calls:
        assert difference() < threshold
    undetected = []
    for number, call in enumerate(calls):
        with _without(number, names):
            noticed = torch.tensor(float(not difference() < threshold))
        dist.all_reduce(noticed)
        if noticed.item() == 0:
            undetected.append(call)
    return len(calls), undetected
