"""How a tensor that is cut over ranks comes to be cut otherwise: what each rank sends to each, and what is made of it.

A move is described here and carried out by :func:`fastfold.parallel.comm.async_ops.start_exchange`, which takes several
moves in one message to each rank. Where all shards are equally long a move is one tensor with an axis for the ranks,
so that neither side needs more operators on more ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Shards(NamedTuple):
    """How a tensor is cut.

    Attributes:
        dim: The dimension, from the front.
        sizes: Lengths of all ranks' shards along it.
    """

    dim: int
    sizes: Sequence[int]

    @property
    def even(self) -> bool:
        """Whether all are equally long."""
        return len(set(self.sizes)) == 1


@dataclass(frozen=True)
class Move:
    """What each rank sends of its tensor to each rank, and what it makes of what arrives.

    Attributes:
        before: How the tensor is cut; None: each rank holds a term of it, and the terms are summed. Every rank adds
            those of its shard itself, in one sum: backends round half precision after every addition.
        after: How the result is cut; None: every rank holds the whole.
    """

    before: Shards | None
    after: Shards | None

    @property
    def op(self) -> str:
        """What a log calls it."""
        if self.before is None:
            return "reduce_scatter"
        return "all_gather" if self.after is None else "all_to_all"

    @property
    def even(self) -> bool:
        """Whether every rank sends as much to each, so that :meth:`stacked` serves."""
        return all(shards is None or shards.even for shards in (self.before, self.after))

    @property
    def adjoint(self) -> Move:
        """What brings the result's gradient back: every rank that holds the whole has a term of its gradient."""
        return Move(self.after, self.before)

    @property
    def _ranks(self) -> int:
        shards = self.before or self.after
        assert shards is not None, "neither end of a move is cut"
        return len(shards.sizes)

    def whole(self, x: Tensor) -> torch.Size:
        """Shape of the tensor that ``x`` is a rank's part of."""
        if self.before is None:
            return x.shape
        dim, sizes = self.before
        return torch.Size((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """What goes to each rank, as views of ``x``."""
        return [x] * self._ranks if self.after is None else x.split(list(self.after.sizes), self.after.dim)

    def stacked(self, x: Tensor) -> Tensor:
        """:meth:`pieces` along a new first axis, as one view of ``x``."""
        if self.after is None:
            return x.expand(self._ranks, *x.shape)
        dim, sizes = self.after
        return x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)

    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """Shapes of what comes from each rank to ``rank``, whose own tensor is ``x``."""
        shape = list(x.shape)
        if self.after is not None:
            shape[self.after.dim] = self.after.sizes[rank]
        found = []
        for source in range(self._ranks):
            if self.before is not None:
                shape[self.before.dim] = self.before.sizes[source]
            found.append(torch.Size(shape))
        return found

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The result, of what came from the ranks."""
        if self.before is None:
            return torch.stack(list(parts)).sum(0)
        return torch.cat(list(parts), self.before.dim)

    def join_stacked(self, parts: Tensor) -> Tensor:
        """:meth:`join` of equal parts along a first axis."""
        if self.before is None:
            return parts.sum(0)
        return parts.movedim(0, self.before.dim).flatten(self.before.dim, self.before.dim + 1)
