"""Flat buffers of parameters, cut into shards over nested groups, and reduced while a backward pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group, Reporter, nested_shard

BUCKET_ELEMENTS = 8_000_000
"""Default number of elements of a bucket: 32 MB of float32, enough for a link's full rate."""


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype and device, packed into one buffer.

    ``numbers`` are their indices in a list, ``starts`` their offsets and ``sizes`` their elements. The length of the
    buffer is a multiple of the number of ranks.
    """

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int


class Sharding:
    """Even shards of a flat buffer over nested groups, the outermost first.

    The shards of one group are cut again over the next group. Groups of one rank change nothing.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(group for group in groups if group.size > 1)
        self.ranks = math.prod(group.size for group in self.groups)

    def own(self, length: int) -> slice:
        """Return this rank's slice of a buffer of ``length``."""
        return nested_shard(length, self.groups)

    def start_reduce_scatter(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start summing ``flat`` ``[length]`` over all ranks; the returned function waits for this rank's shard."""

        def start(x: Tensor, group: Group) -> async_ops.AsyncResult[Tensor]:
            each = x.shape[0] // group.size
            return async_ops.start_reduce_scatter(x, 0, group, [each] * group.size)

        return self._start(flat, start)

    def start_all_reduce(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start summing ``flat`` over all ranks; the returned function waits for the sum."""
        return self._start(flat, async_ops.start_all_reduce)

    def _start(
        self, flat: Tensor, start: Callable[[Tensor, Group], async_ops.AsyncResult[Tensor]]
    ) -> Callable[[], Tensor]:
        if not self.groups:
            return lambda: flat
        first, *others = self.groups
        pending = start(flat, first)

        def finish() -> Tensor:
            summed = pending.wait()
            for group in others:
                summed = start(summed, group).wait()
            return summed

        return finish

    def gather(self, shard: Tensor) -> Tensor:
        """Gather the shards of all ranks into the whole buffer."""
        for group in reversed(self.groups):
            shard = async_ops.start_gather(shard, 0, group, [shard.shape[0]] * group.size).wait()
        return shard


class Buckets:
    """Partition of a list of parameters into buckets.

    The buckets run from the last parameter to the first, the order in which gradients become ready. Only shapes, dtypes
    and devices are kept. ``ranks`` divides the length of every bucket, which is closed when it has ``elements``
    elements.
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
        """Pack a bucket's tensors into one buffer ``[length]``.

        Padding is zero, and so is the place of a tensor that is None.

        Raises:
            ConfigError: A tensor is sparse.
        """
        like = self._like[bucket.numbers[0]]
        sparse = next((x for x in tensors if x is not None and x.layout is not torch.strided), None)
        if sparse is not None:
            raise ConfigError(
                f"expected dense gradients, found a sparse one of shape {list(sparse.shape)}; create its layer with "
                "sparse=False"
            )
        pieces = [
            like.new_zeros(size) if x is None else x.detach().reshape(-1)
            for x, size in zip((tensors[number] for number in bucket.numbers), bucket.sizes, strict=True)
        ]
        return torch.cat([*pieces, like.new_zeros(bucket.length - sum(bucket.sizes))])

    def split(self, bucket: Bucket, flat: Tensor) -> dict[int, Tensor]:
        """Split a bucket's buffer into views in the shapes of its parameters, by their indices."""
        return {
            number: flat[start : start + size].view(self.shapes[number])
            for number, start, size in zip(bucket.numbers, bucket.starts, bucket.sizes, strict=True)
        }

    def spans(self, bucket: Bucket, part: slice) -> dict[int, tuple[slice, slice]]:
        """Return the slices of each flattened parameter and of a part of the bucket that match; they may be empty."""
        spans = {}
        for number, start, size in zip(bucket.numbers, bucket.starts, bucket.sizes, strict=True):
            first = min(max(part.start, start), start + size)
            last = max(first, min(part.stop, start + size))
            inside = slice(first - part.start, last - part.start) if last > first else slice(0, 0)
            spans[number] = (slice(first - start, last - start), inside)
        return spans


def broadcast_tensors(tensors: Sequence[Tensor], group: Group) -> None:
    """Overwrite tensors with those of the group's first rank, which only reads its own, in few messages."""
    buckets = Buckets(tensors)
    for bucket in buckets:
        own = buckets.join(bucket, tensors)
        flat = async_ops.start_broadcast(own, 0, group).wait()
        for number, x in buckets.split(bucket, flat).items() if group.rank else ():
            tensors[number].detach().copy_(x)


Start = Callable[[Tensor], Callable[[], Tensor]]
"""Function that starts a reduction of a buffer; it returns a function that waits for the result."""


def apart(sharding: Sharding, reporter: Reporter) -> Sharding:
    """Return the same shards over new groups for gradients only (a collective of each group).

    All ranks of a group must send their messages in one order. Ranks that use different parameters start to reduce at
    different points between the messages of the model's layers, so gradients need their own groups.
    """
    groups = []
    for group in sharding.groups:
        if group.backend == "fake":
            groups.append(group)
            continue
        assert group.process_group is not None
        ranks = dist.get_process_group_ranks(group.process_group)
        groups.append(Group(dist.new_group(ranks, use_local_synchronization=True), group.name, reporter))
    return Sharding(groups)


class EarlyReduction:
    """Reductions of a model's buckets, each started when all gradients of the bucket are ready.

    Buckets start in one order on all ranks, whatever the order in which gradients become ready. A bucket with a
    parameter that a rank does not use, and all later buckets, start after the backward pass. ``start`` starts the
    reduction of a bucket's buffer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buckets: Buckets, start: Start) -> None:
        self._parameters, self._buckets, self._start = list(parameters), buckets, start
        self._order = list(buckets)
        self._bucket_of = {
            number: place for place, bucket in enumerate(self._order) for number in bucket.numbers
        }
        self._missing: list[set[int]] = []
        self._under_way: list[Callable[[], Tensor]] = []
        self._used: set[int] = set()
        self._again: int | None = None

    @property
    def started(self) -> int:
        """Number of buckets whose reduction has started."""
        return len(self._under_way)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Reduce buckets during the last backward pass before :meth:`take`.

        Raises:
            ConfigError: Gradients of an earlier pass were not taken, or a gradient changed after it was sent.
        """
        if self._under_way:
            raise ConfigError(
                "gradients of another backward pass are still being reduced: run only the last backward pass before "
                "reduce_gradients() inside overlapped()"
            )
        # Others were frozen after the plan was applied.
        training = {number for number, p in enumerate(self._parameters) if p.requires_grad}
        self._missing = [training.intersection(bucket.numbers) for bucket in self._order]
        handles = [
            self._parameters[number].register_post_accumulate_grad_hook(partial(self._arrived, number))
            for number in training
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._refuse_added(self._again)

    def _arrived(self, number: int, _: Tensor) -> None:
        place = self._bucket_of[number]
        if place < len(self._under_way):
            self._again = number
        self._missing[place].discard(number)
        while len(self._under_way) < len(self._order) and not self._missing[len(self._under_way)]:
            self._send(self._order[len(self._under_way)])

    def _send(self, bucket: Bucket) -> None:
        gradients = [p.grad for p in self._parameters]
        self._used.update(number for number in bucket.numbers if gradients[number] is not None)
        flat = self._buckets.join(bucket, gradients)
        for number in bucket.numbers:
            self._parameters[number].grad = None
        self._under_way.append(self._start(flat))

    def take(self) -> tuple[list[Tensor], set[int]]:
        """Finish all reductions; return the buckets' buffers and the indices of the used parameters.

        Raises:
            ConfigError: A gradient changed after it was sent.
        """
        for bucket in self._order[: len(self._under_way)]:
            self._refuse_added(
                next((n for n in bucket.numbers if self._parameters[n].grad is not None), None)
            )
        for bucket in self._order[len(self._under_way) :]:
            self._send(bucket)
        under_way, used = self._under_way, self._used
        self.forget()
        return [wait() for wait in under_way], used

    def forget(self) -> None:
        """Discard the started reductions."""
        self._under_way, self._used, self._again = [], set(), None

    def _refuse_added(self, number: int | None) -> None:
        if number is None:
            return
        raise ConfigError(
            f"a gradient of shape {tuple(self._parameters[number].shape)} changed after it was sent to other ranks: "
            "run only the last backward pass before reduce_gradients() inside overlapped(), and call checkpoint() with "
            "use_reentrant=False"
        )
