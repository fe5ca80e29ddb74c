"""Ranks as threads of this process: ``torch.distributed`` by its definition, where processes would test nothing more.

Collectives are done at once, when every rank has come: a program that is right with them may still be wrong about what
overlaps, which ``spawn_ranks`` shows. Ranks share PyTorch's random number generator, so nothing that they do may draw.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, BrokenBarrierError
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fastfold.memory.gemini import distributed
from fastfold.parallel.comm import async_ops, groups
from fastfold.parallel.comm.groups import Group

_SECONDS = 60.0
_LINES: weakref.WeakSet[Line] = weakref.WeakSet()


class Line:
    """Some ranks that meet: a process group."""

    def __init__(self, size: int) -> None:
        self.barrier, self.sent = Barrier(size), [None] * size
        self.size = size
        _LINES.add(self)

    def group(self, rank: int, name: str = "line") -> Group:
        """The group as one of its ranks sees it."""
        return Group(Seat(self, rank), name)  # type: ignore[arg-type]


class Seat(NamedTuple):
    """A rank in a line: what stands for a process group."""

    line: Line
    rank: int

    def all(self, value: Any) -> list[Any]:
        """What every rank gave, when all have given it."""
        self.line.sent[self.rank] = value
        self.line.barrier.wait(_SECONDS)
        found = list(self.line.sent)
        self.line.barrier.wait(_SECONDS)
        return found


class _Done:
    def wait(self) -> None:
        pass


class _Threads:
    """The functions of ``torch.distributed`` that the package calls."""

    def get_world_size(self, group: Seat) -> int:
        return group.line.size

    def get_rank(self, group: Seat) -> int:
        return group.rank

    def get_backend(self, group: Seat) -> str:
        return "gloo"

    def get_global_rank(self, group: Seat, rank: int) -> int:
        return rank

    def all_gather_object(self, out: list[Any], value: Any, group: Seat) -> None:
        out[:] = group.all(value)

    def broadcast_object_list(self, objects: list[Any], source: int, group: Seat) -> None:
        objects[:] = group.all(list(objects))[source]

    def all_gather(self, out: Tensor, x: Tensor, *, group: Seat, async_op: bool = False) -> _Done:
        out.copy_(torch.cat(group.all(x.clone())))
        return _Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int], *, group: Seat, async_op: bool
    ) -> _Done:
        pieces = [piece[group.rank] for piece in group.all(x.clone().split(sent))]
        assert [len(piece) for piece in pieces] == received
        out.copy_(torch.cat(pieces))
        return _Done()

    def all_reduce(self, x: Tensor, *, group: Seat, async_op: bool = False) -> _Done:
        x.copy_(sum(group.all(x.clone())))
        return _Done()

    def broadcast(
        self,
        x: Tensor,
        source: int | None = None,
        *,
        group: Seat,
        group_src: int | None = None,
        async_op: bool = False,
    ) -> _Done:
        found = group.all(x.clone())[source if group_src is None else group_src]  # type: ignore[index]
        if group.rank != (source if group_src is None else group_src):
            x.copy_(found)
        return _Done()

    def reduce(
        self,
        x: Tensor,
        target: int | None = None,
        *,
        group: Seat,
        group_dst: int | None = None,
        async_op: bool = False,
    ) -> _Done:
        total = sum(group.all(x.clone()))
        mine = group.rank == (target if group_dst is None else group_dst)
        x.copy_(total) if mine else x.fill_(torch.nan)  # nobody else's business
        return _Done()


def together(size: int, function: Callable[[int], Any]) -> list[Any]:
    """What a function of the rank's number gives on each of some ranks.

    Raises:
        Exception: What a rank raised, before others gave up waiting for it.
    """

    def run(rank: int) -> Any:
        try:
            return function(rank)
        except BaseException as error:
            for line in list(_LINES):
                line.barrier.abort()
            return error

    threads = _Threads()
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        for module in (async_ops, groups, distributed):
            stack.enter_context(patch.object(module, "dist", threads))
        stack.enter_context(patch.object(async_ops, "_all_gather", threads.all_gather))
        found = list(pool.map(run, range(size)))
    errors = [one for one in found if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
        raise error
    return found


def on_one_line(size: int, function: Callable[[Group], Any]) -> list[Any]:
    """:func:`together`, of a function of the group of all."""
    line = Line(size)
    return together(size, lambda rank: function(line.group(rank)))


def on_a_grid(shape: Sequence[int], function: Callable[..., Any]) -> list[Any]:
    """:func:`together`, of a function of this rank's line along each axis of a grid; the last axis runs fastest."""
    count = 1
    for size in shape:
        count *= size

    def place(rank: int) -> tuple[int, ...]:
        found = []
        for size in reversed(shape):
            found.append(rank % size)
            rank //= size
        return tuple(reversed(found))

    lines: dict[tuple[int, tuple[int, ...]], Line] = {}
    for axis, size in enumerate(shape):
        for rank in range(count):
            at = place(rank)
            lines.setdefault((axis, (*at[:axis], *at[axis + 1 :])), Line(size))

    def run(rank: int) -> Any:
        at = place(rank)
        return function(
            *(
                lines[axis, (*at[:axis], *at[axis + 1 :])].group(at[axis], f"axis {axis}")
                for axis in range(len(shape))
            )
        )

    return together(count, run)
