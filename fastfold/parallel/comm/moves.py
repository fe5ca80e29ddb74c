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
        filled: Rows and columns of the result, if it shall have more than there are: zeros behind them.
    """

    before: Shards | None
    after: Shards | None
    filled: tuple[int, int] | None = None

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
        dim, sizes = self.before
        shape = (*parts[0].shape[:dim], sum(sizes), *parts[0].shape[dim + 1 :])
        if self.filled is None or shape[-2:] == self.filled:
            return torch.cat(list(parts), dim)
        out, inside = self._filled(parts[0], torch.Size(shape))
        torch.cat(list(parts), dim, out=inside)
        return out

    def join_stacked(self, parts: Tensor) -> Tensor:
        """:meth:`join` of equal parts along a first axis."""
        if self.before is None:
            return parts.sum(0)
        dim = self.before.dim
        found = parts.movedim(0, dim)
        shape = torch.Size((*found.shape[:dim], found.shape[dim : dim + 2].numel(), *found.shape[dim + 2 :]))
        if self.filled is None or shape[-2:] == self.filled:
            return found.flatten(dim, dim + 1)
        out, inside = self._filled(parts, shape)
        inside.unflatten(dim, found.shape[dim : dim + 2]).copy_(found)
        return out

    def _filled(self, like: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """A result with zeros behind its rows and columns, and the part of it that is to be written."""
        assert self.filled is not None
        out = like.new_empty(*shape[:-2], *self.filled)
        out[..., shape[-2] :, :].zero_()
        out[..., shape[-1] :].zero_()
        return out, out[..., : shape[-2], : shape[-1]]
