"""Gradient buckets that are reduced while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group, Reporter
from fastfold.parallel.data_parallel.buckets import Bucket, Buckets, Sharding

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
        self._missing = [set(bucket.numbers) for bucket in self._order]
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._refuse_added(self._again)

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            place = self._bucket_of[number]
            if place < len(self._under_way):
                self._again = number
            self._missing[place].discard(number)
            while len(self._under_way) < len(self._order) and not self._missing[len(self._under_way)]:
                self._send(self._order[len(self._under_way)])

        return arrived

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
