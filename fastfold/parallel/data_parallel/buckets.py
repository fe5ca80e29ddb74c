"""Parameters side by side in flat buffers, which are cut into shards over one group of ranks after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group

BUCKET_ELEMENTS = 8_000_000
"""Elements of a bucket by default: 32 MB of float32, long enough for a link's full rate."""


@dataclass(frozen=True)
class Bucket:
    """Some parameters of one dtype and device, one after another.

    Attributes:
        numbers: Which parameters of a list.
        starts: Where each begins.
        sizes: How many elements each has.
        length: Length of the buffer: their sum, and at most ``ranks - 1`` zeros so that all shards are equally long.
    """

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int


class Sharding:
    """Even shards of a flat buffer over nested groups: those of the first are cut again over the second, and so on.

    Args:
        groups: The groups; those of one rank do nothing.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(group for group in groups if group.size > 1)
        self.ranks = math.prod(group.size for group in self.groups)

    def own(self, length: int) -> slice:
        """This rank's part of a buffer of ``length``."""
        start = 0
        for group in self.groups:
            length //= group.size
            start += group.rank * length
        return slice(start, start + length)

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """This rank's shard of the sum over all ranks of ``flat`` ``[length]``."""
        return self.start_reduce_scatter(flat)()

    def start_reduce_scatter(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`reduce_scatter` over the first group; what is returned waits, and goes on over the others."""

        def start(x: Tensor, group: Group) -> async_ops.AsyncResult[Tensor]:
            each = x.shape[0] // group.size
            return async_ops.start_reduce_scatter(x, 0, group, [each] * group.size)

        return self._start(flat, start)

    def all_reduce(self, flat: Tensor) -> Tensor:
        """The sum over all ranks of ``flat``."""
        return self.start_all_reduce(flat)()

    def start_all_reduce(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`all_reduce` over the first group; what is returned waits, and goes on over the others."""
        return self._start(flat, lambda x, group: async_ops.start_all_reduce(x, group))

    def _start(
        self, flat: Tensor, start: Callable[[Tensor, Group], async_ops.AsyncResult[Tensor]]
    ) -> Callable[[], Tensor]:
        if not self.groups:
            return lambda: flat
        first, *others = self.groups
        pending = start(flat, first)

        def finish() -> Tensor:
            found = pending.wait()
            for group in others:
                found = start(found, group).wait()
            return found

        return finish

    def gather(self, shard: Tensor) -> Tensor:
        """The buffer of all ranks' shards; undoes the cut."""
        for group in reversed(self.groups):
            shard = async_ops.start_gather(shard, 0, group, [shard.shape[0]] * group.size).wait()
        return shard


class Buckets:
    """A list of parameters in buckets.

    The buckets run from the last parameter to the first, the order in which gradients become ready.

    Args:
        parameters: The parameters; only their shapes, dtypes and devices are kept.
        ranks: Every bucket's length is a multiple of it.
        elements: A bucket is closed when it has this many; None for the default.
    """

    def __init__(self, parameters: Sequence[Tensor], ranks: int = 1, elements: int | None = None) -> None:
        elements = elements or BUCKET_ELEMENTS
        self.shapes = [parameter.shape for parameter in parameters]
        self._like = [parameter.new_empty(0) for parameter in parameters]
        self._buckets: list[Bucket] = []
        self._ranks = ranks
        open_: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number in reversed(range(len(parameters))):
            parameter = parameters[number]
            kind = (parameter.dtype, parameter.device)
            open_.setdefault(kind, []).append(number)
            if sum(self.shapes[i].numel() for i in open_[kind]) >= elements:
                self._close(open_.pop(kind))
        for numbers in open_.values():
            self._close(numbers)

    def _close(self, numbers: list[int]) -> None:
        sizes = [self.shapes[i].numel() for i in numbers]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        length = -(-sum(sizes) // self._ranks) * self._ranks
        self._buckets.append(Bucket(tuple(numbers), tuple(starts), tuple(sizes), length))

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def join(self, bucket: Bucket, tensors: Sequence[Tensor | None]) -> Tensor:
        """The bucket's tensors as one ``[length]``; zeros for those that are None and for the padding.

        Args:
            bucket: One of these buckets.
            tensors: For every parameter of the list one of its shape, or None.

        Raises:
            ConfigError: One of them is sparse.
        """
        like = self._like[bucket.numbers[0]]
        sparse = next((x for x in tensors if x is not None and x.layout is not torch.strided), None)
        if sparse is not None:
            raise ConfigError(
                f"a gradient of shape {list(sparse.shape)} is sparse, and ranks add up dense ones; make its layer with "
                "sparse=False"
            )
        pieces = [
            like.new_zeros(size) if x is None else x.detach().reshape(-1)
            for x, size in zip((tensors[number] for number in bucket.numbers), bucket.sizes, strict=True)
        ]
        return torch.cat([*pieces, like.new_zeros(bucket.length - sum(bucket.sizes))])

    def split(self, bucket: Bucket, flat: Tensor) -> dict[int, Tensor]:
        """Views of a bucket's buffer in the shapes of its parameters, by their numbers."""
        return {
            number: flat[start : start + size].view(self.shapes[number])
            for number, start, size in zip(bucket.numbers, bucket.starts, bucket.sizes, strict=True)
        }

    def spans(self, bucket: Bucket, part: slice) -> dict[int, tuple[slice, slice]]:
        """What of each parameter lies in a part of the bucket, by the parameters' numbers; may be nothing.

        Returns:
            For each parameter the slice of its flattened self, and where that lies within the part.
        """
        found = {}
        for number, start, size in zip(bucket.numbers, bucket.starts, bucket.sizes, strict=True):
            first = min(max(part.start, start), start + size)
            last = max(first, min(part.stop, start + size))
            inside = slice(first - part.start, last - part.start) if last > first else slice(0, 0)
            found[number] = (slice(first - start, last - start), inside)
        return found
