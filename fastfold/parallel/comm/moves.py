"""How a tensor that is cut over ranks comes to be cut otherwise: what each rank sends to each, and what is made of it.

A move is described here and carried out by :func:`fastfold.parallel.comm.async_ops.start_exchange`, which takes several
moves in one message to each rank. Where all shards are equally long a move is one tensor with an axis for the ranks,
so that neither side needs more operators on more ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def is_even(sizes: Sequence[int]) -> bool:
    """Whether all shards are equally long."""
    return len(set(sizes)) == 1


class Move(ABC):
    """What each rank sends of its tensor to each rank, and what it makes of what arrives."""

    op: str
    """What a log calls it."""

    @property
    @abstractmethod
    def even(self) -> bool:
        """Whether every rank sends as much to each, so that :meth:`stacked` serves."""

    @property
    @abstractmethod
    def adjoint(self) -> Move:
        """What brings the result's gradient back."""

    @abstractmethod
    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """What goes to each rank, as views of ``x``."""

    @abstractmethod
    def stacked(self, x: Tensor) -> Tensor:
        """:meth:`pieces` along a new first axis, as one view of ``x``."""

    @abstractmethod
    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """Shapes of what comes from each rank to ``rank``, whose own tensor is ``x``."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The result, of what came from the ranks."""

    @abstractmethod
    def join_stacked(self, parts: Tensor) -> Tensor:
        """:meth:`join` of equal parts along a first axis."""


@dataclass(frozen=True)
class Reshard(Move):
    """From a shard along one dimension to a shard along another one.

    Attributes:
        cut: Dimension that is cut afterwards, from the front.
        join_dim: Dimension that is whole afterwards.
        cut_sizes: Lengths of all ranks' shards afterwards.
        join_sizes: Lengths of all ranks' shards before.
    """

    cut: int
    join_dim: int
    cut_sizes: Sequence[int]
    join_sizes: Sequence[int]
    op = "all_to_all"

    @property
    def even(self) -> bool:
        """See :class:`Move`."""
        return is_even(self.cut_sizes) and is_even(self.join_sizes)

    @property
    def adjoint(self) -> Reshard:
        """See :class:`Move`."""
        return Reshard(self.join_dim, self.cut, self.join_sizes, self.cut_sizes)

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """See :class:`Move`."""
        return x.split(list(self.cut_sizes), self.cut)

    def stacked(self, x: Tensor) -> Tensor:
        """See :class:`Move`."""
        return _stacked(x, self.cut, self.cut_sizes)

    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """See :class:`Move`."""
        found = []
        for size in self.join_sizes:
            shape = list(x.shape)
            shape[self.cut], shape[self.join_dim] = self.cut_sizes[rank], size
            found.append(torch.Size(shape))
        return found

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        return torch.cat(list(parts), self.join_dim)

    def join_stacked(self, parts: Tensor) -> Tensor:
        """See :class:`Move`."""
        return _joined(parts, self.join_dim)


@dataclass(frozen=True)
class Gather(Move):
    """From a shard to the whole tensor on every rank.

    Attributes:
        dim: The dimension that is cut, from the front.
        sizes: Lengths of all ranks' shards.
    """

    dim: int
    sizes: Sequence[int]
    op = "all_gather"

    @property
    def even(self) -> bool:
        """See :class:`Move`."""
        return is_even(self.sizes)

    @property
    def adjoint(self) -> ReduceScatter:
        """See :class:`Move`."""
        return ReduceScatter(self.dim, self.sizes)

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """See :class:`Move`."""
        return [x] * len(self.sizes)

    def stacked(self, x: Tensor) -> Tensor:
        """See :class:`Move`."""
        return x.expand(len(self.sizes), *x.shape)

    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """See :class:`Move`."""
        return [torch.Size((*x.shape[: self.dim], size, *x.shape[self.dim + 1 :])) for size in self.sizes]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        return torch.cat(list(parts), self.dim)

    def join_stacked(self, parts: Tensor) -> Tensor:
        """See :class:`Move`."""
        return _joined(parts, self.dim)


@dataclass(frozen=True)
class ReduceScatter(Move):
    """From a term on every rank to the sum over the ranks, of which each keeps a shard.

    Every rank adds the terms of its shard itself, in one sum: backends round half precision after every addition.

    Attributes:
        dim: The dimension that is cut afterwards, from the front.
        sizes: Lengths of all ranks' shards.
    """

    dim: int
    sizes: Sequence[int]
    op = "reduce_scatter"

    @property
    def even(self) -> bool:
        """See :class:`Move`."""
        return is_even(self.sizes)

    @property
    def adjoint(self) -> Gather:
        """See :class:`Move`."""
        return Gather(self.dim, self.sizes)

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """See :class:`Move`."""
        return x.split(list(self.sizes), self.dim)

    def stacked(self, x: Tensor) -> Tensor:
        """See :class:`Move`."""
        return _stacked(x, self.dim, self.sizes)

    def shapes(self, x: Tensor, rank: int) -> list[torch.Size]:
        """See :class:`Move`."""
        own = torch.Size((*x.shape[: self.dim], self.sizes[rank], *x.shape[self.dim + 1 :]))
        return [own] * len(self.sizes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        return self.join_stacked(torch.stack(list(parts)))

    def join_stacked(self, parts: Tensor) -> Tensor:
        """See :class:`Move`."""
        return parts.sum(0)


def _stacked(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)


def _joined(parts: Tensor, dim: int) -> Tensor:
    return parts.movedim(0, dim).flatten(dim, dim + 1)
