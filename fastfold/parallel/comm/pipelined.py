"""Panels of a matrix product on a grid: broadcast by one rank after another, or summed on it.

The communication of one panel overlaps with the computation of the previous one. A rank holds only the panel in use
and the one that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed
from fastfold.parallel.comm.groups import Group


def broadcasts(piece: Callable[[int], Tensor], owners: Sequence[int], group: Group) -> Iterator[Tensor]:
    """Yield every panel's piece, from the rank of the group that owns it; other ranks give :func:`absent` ones."""

    def start(panel: int) -> AsyncResult[Tensor]:
        own = piece(panel)
        return completed(own) if group.size == 1 else async_ops.start_broadcast(own, owners[panel], group)

    following = start(0)
    for panel in range(len(owners)):
        pending = following
        if panel + 1 < len(owners):
            following = start(panel + 1)
        yield pending.wait()


def absent(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor of a shape that takes no memory, for a piece that another rank owns."""
    return like.new_empty(()).expand(shape)


def sums(terms: Iterable[Tensor], owners: Sequence[int], group: Group) -> list[Tensor]:
    """Sum each panel's terms over the ranks; return the sums that this rank owns.

    Terms are computed one at a time; the other arguments are those of :func:`broadcasts`.
    """
    own: list[Tensor] = []
    before: tuple[int, AsyncResult[Tensor]] | None = None

    def collect() -> None:
        if before is not None:
            total = before[1].wait()
            if before[0] == group.rank:
                own.append(total)

    for owner, term in zip(owners, terms, strict=True):
        pending = completed(term) if group.size == 1 else async_ops.start_reduce(term, owner, group)
        collect()
        before = owner, pending
    collect()
    return own
