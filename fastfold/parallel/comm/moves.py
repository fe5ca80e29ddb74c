"""Moves of a tensor from one cut over ranks to another: the sent pieces, and the result made of the received ones.

:func:`fastfold.parallel.comm.async_ops.start_exchange` carries out several moves in one message to each rank. If all
shards are equally long, a move is one tensor with an axis for the ranks. Then the number of operators does not grow
with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Box = tuple[slice, ...]  #: Part of each dimension, with explicit start and stop


class Shards(NamedTuple):
    """Cut of a tensor along one dimension.

    ``dim`` is counted from the front, and ``sizes`` has the lengths of all ranks' shards.
    """

    dim: int
    sizes: Sequence[int]

    @property
    def even(self) -> bool:
        """True if all shards are equally long."""
        return len(set(self.sizes)) == 1


@dataclass(frozen=True)
class Move:
    """Change of a tensor's cut over ranks."""

    #: Cut of the tensor. None if each rank holds a term of it; the terms are summed. Every rank adds the terms of its
    #: shard itself, in one sum, because backends round half precision after every addition.
    before: Shards | None
    after: Shards | None  #: Cut of the result; None if every rank holds the whole
    filled: tuple[int, int] | None = None  #: Rows and columns of the result, if it is padded with zeros

    @property
    def op(self) -> str:
        """Name in a log."""
        if self.before is None:
            return "reduce_scatter"
        return "all_gather" if self.after is None else "all_to_all"

    @property
    def even(self) -> bool:
        """True if every rank sends as much to each, so that :meth:`stacked` can be used."""
        return all(shards is None or shards.even for shards in (self.before, self.after))

    @property
    def adjoint(self) -> Move:
        """Move of the result's gradient: every rank that holds the whole has a term of its gradient."""
        return Move(self.after, self.before)

    @property
    def _ranks(self) -> int:
        shards = self.before or self.after
        assert shards is not None, "neither end of a move is cut"
        return len(shards.sizes)

    def whole(self, x: Tensor) -> torch.Size:
        """Return the shape of the whole tensor; ``x`` is a rank's part of it."""
        if self.before is None:
            return x.shape
        dim, sizes = self.before
        return torch.Size((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """Return the piece for each rank, as views of ``x``."""
        return [x] * self._ranks if self.after is None else x.split(list(self.after.sizes), self.after.dim)

    def stacked(self, x: Tensor) -> Tensor:
        """Return :meth:`pieces` along a new first axis, as one view of ``x``."""
        if self.after is None:
            return x.expand(self._ranks, *x.shape)
        dim, sizes = self.after
        return x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)

    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """Return the shapes of the pieces that ``rank`` receives; its own tensor is ``x``."""
        shape = list(x.shape)
        if self.after is not None:
            shape[self.after.dim] = self.after.sizes[rank]
        shapes = []
        for source in range(self._ranks):
            if self.before is not None:
                shape[self.before.dim] = self.before.sizes[source]
            shapes.append(torch.Size(shape))
        return shapes

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the received pieces to the result."""
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
        """Join equal pieces along a first axis as :meth:`join` does."""
        if self.before is None:
            return parts.sum(0)
        dim = self.before.dim
        moved = parts.movedim(0, dim)
        shape = torch.Size((*moved.shape[:dim], moved.shape[dim : dim + 2].numel(), *moved.shape[dim + 2 :]))
        if self.filled is None or shape[-2:] == self.filled:
            return moved.flatten(dim, dim + 1)
        out, inside = self._filled(parts, shape)
        inside.unflatten(dim, moved.shape[dim : dim + 2]).copy_(moved)
        return out

    def _filled(self, like: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return a result with zeros after its rows and columns, and the part of it to write."""
        assert self.filled is not None
        out = like.new_empty(*shape[:-2], *self.filled)
        out[..., shape[-2] :, :].zero_()
        out[..., shape[-1] :].zero_()
        return out, out[..., : shape[-2], : shape[-1]]


@dataclass(frozen=True)
class BoxMove:
    """Change from one layout of boxes to another; the boxes of the ranks cover each element once."""

    dims: Sequence[int]  #: Dimensions of the boxes, counted from the front; others are whole
    source: Sequence[Box]  #: Each rank's box of the tensor
    target: Sequence[Box]  #: Each rank's box of the result
    rank: int  #: This rank
    op = "all_to_all"  #: Name in a log

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """Return the piece for each rank, as views of ``x``."""
        held = self.source[self.rank]
        return [self._part(x, held, _common(held, box)) for box in self.target]

    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """Return the shapes of the pieces that ``rank`` receives; its own tensor is ``x``."""
        return [self._shape(x, _common(box, self.target[rank])) for box in self.source]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the received pieces to the result."""
        wanted = self.target[self.rank]
        out = parts[0].new_empty(self._shape(parts[0], wanted))
        for part, box in zip(parts, self.source, strict=True):
            self._part(out, wanted, _common(box, wanted)).copy_(part)
        return out

    def _shape(self, x: Tensor, box: Box) -> torch.Size:
        sizes = list(x.shape)
        for dim, part in zip(self.dims, box, strict=True):
            sizes[dim] = part.stop - part.start
        return torch.Size(sizes)

    def _part(self, x: Tensor, held: Box, box: Box) -> Tensor:
        """Return the part ``box`` of a tensor that holds ``held``."""
        for dim, here, part in zip(self.dims, held, box, strict=True):
            length = part.stop - part.start
            # An empty part may be outside.
            x = x.narrow(dim, part.start - here.start if length else 0, length)
        return x


def _common(one: Box, other: Box) -> Box:
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))
