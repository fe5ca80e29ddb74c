"""Panels of a matrix product on a grid: pieces that one rank after another gives to all, or gets the sum of.

The communication of one panel overlaps with what is computed with the one before. At any time a rank holds the piece in
use and the one that arrives, never all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed
from fastfold.parallel.comm.groups import Group


def broadcasts(piece: Callable[[int], Tensor], owners: Sequence[int], group: Group) -> Iterator[Tensor]:
    """Every panel's piece, from the rank that owns it.

    Args:
        piece: Panel p's piece on its owner; a tensor of its shape on the others (see :func:`absent`).
        owners: For each panel the rank within the group.
        group: The ranks.
    """

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
    """A tensor of a shape that takes no memory, for a piece that another rank owns."""
    return like.new_empty(()).expand(shape)


def sums(terms: Iterable[Tensor], owners: Sequence[int], group: Group) -> list[Tensor]:
    """Sums over the ranks of each panel's term, of which those that this rank owns are returned.

    Args:
        terms: This rank's term for each panel; made one at a time.
        owners: For each panel the rank within the group.
        group: The ranks.
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
