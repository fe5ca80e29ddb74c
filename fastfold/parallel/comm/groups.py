"""Groups of ranks that communicate, and logs of their messages in bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch.distributed as dist

from fastfold.errors import ConfigError
from fastfold.utils.foreign_text import parse_json
from fastfold.utils.module_structure import differences, digest


def shard_sizes(length: int, parts: int) -> list[int]:
    """Return the lengths of ``parts`` consecutive shards of ``length``; the first are one longer.

    No padding: 7 over 3 is ``[3, 2, 2]``, 2 over 3 is ``[1, 1, 0]``.

    Raises:
        ValueError: ``length`` is negative or ``parts`` is not positive.

    Example:
        >>> import torch
        >>> from fastfold.parallel import shard_sizes
        >>> shard_sizes(10, 4)
        [3, 3, 2, 2]
        >>> [part.tolist() for part in torch.arange(10).split(shard_sizes(10, 4))]
        [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    """
    if length < 0 or parts < 1:
        raise ValueError(f"cannot cut a length of {length} into {parts} shards")
    whole, longer = divmod(length, parts)
    return [whole + (i < longer) for i in range(parts)]


def shard_slices(length: int, parts: int) -> list[slice]:
    """Return the shards of an axis of ``length`` as :func:`shard_sizes` cuts it."""
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(shard_sizes(length, parts))])]


def nested_shard(length: int, groups: Iterable[Group]) -> slice:
    """Return this rank's part of an axis of ``length`` that is cut over successive groups, the outermost first."""
    start = 0
    for group in groups:
        own = group.shard(length)
        start, length = start + own.start, own.stop - own.start
    return slice(start, start + length)


@dataclass(frozen=True)
class Communication:
    """One collective as one rank saw it."""

    #: ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``all_reduce``, ``broadcast``, ``reduce`` or ``shift``
    op: str
    group: str  #: Name of the group
    size: int  #: Ranks in the group
    #: Bytes that this rank sends. Broadcast, reduce and all-reduce (2 (P - 1) / P of the tensor) count their mean over
    #: the group, because the sending rank depends on the algorithm.
    sent: float


@dataclass
class CommunicationLog:
    """Collectives of forward and backward passes, in the order in which this rank started them.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelMLP
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> with fake_mesh(ParallelPlan(tp=4)) as mesh, mesh.record() as log:  # simulates one of four ranks
        ...     y = ParallelMLP.from_plain(mlp, mesh)(torch.ones(2, 8))
        >>> log.entries
        [Communication(op='all_reduce', group='tp', size=4, sent=96.0)]
        >>> log.sent == 2 * 3 / 4 * y.nbytes
        True
    """

    entries: list[Communication] = field(default_factory=list)

    @property
    def sent(self) -> float:
        """Bytes sent by this rank in total."""
        return sum(entry.sent for entry in self.entries)


class Reporter:
    """Functions to which the groups of one mesh report their messages."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Communication], None]] = []

    def report(self, entry: Communication) -> None:
        """Pass an entry to every listener."""
        for listener in self._listeners:
            listener(entry)

    @contextmanager
    def heard_by(self, listener: Callable[[Communication], None]) -> Iterator[None]:
        """Pass all messages to a function until the context ends."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            # Other threads may be reporting.
            self._listeners = [other for other in self._listeners if other is not listener]

    @contextmanager
    def record(self) -> Iterator[CommunicationLog]:
        """Log all messages until the context ends."""
        log = CommunicationLog()
        with self.heard_by(log.entries.append):
            yield log


class Group:
    """Ranks that communicate with each other: a process group, None for one rank, with a name shown in logs.

    The reporter of bytes is shared by the groups of a mesh.

    Example:
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> with fake_mesh(ParallelPlan(sp=4), rank=1) as mesh:  # simulates one of four ranks
        ...     group = mesh.group("sp")
        ...     print(group, group.shard(10))
        Group(sp, rank 1 of 4) slice(3, 6, None)
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, name: str = "group", reporter: Reporter | None = None
    ) -> None:
        self.process_group = process_group
        self.name = name
        self.reporter = reporter or Reporter()

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    @cached_property
    def rank(self) -> int:
        """This rank's number within the group, from 0."""
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    @cached_property
    def backend(self) -> str:
        """``nccl``, ``gloo``, ``fake``, ...; empty for a single rank."""
        return "" if self.process_group is None else dist.get_backend(self.process_group)

    @property
    def is_alone(self) -> bool:
        """True without other ranks to compare with: one rank, or torch's fake process group."""
        return self.size == 1 or self.backend == "fake"

    def shard(self, length: int) -> slice:
        """Return this rank's part of an axis of ``length`` as :func:`shard_sizes` cuts it."""
        return shard_slices(length, self.size)[self.rank]

    def report(self, op: str, sent: float) -> None:
        """Report bytes that this rank sends in one collective."""
        self.reporter.report(Communication(op, self.name, self.size, sent))

    def __deepcopy__(self, memo: dict[int, object]) -> Group:
        # A copy of a module (such as an average of weights) communicates with the same ranks.
        return self

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size})"


def agree_over_store(what: str, own: Mapping[str, str], problem: str) -> None:
    """Compare facts of all ranks over the store on which they met, before any collective.

    ``what`` is their kind, for the store's keys; ``problem`` begins the message.

    Raises:
        ConfigError: They differ. Every rank raises.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    # Each rank numbers its comparisons, so facts of different comparisons have different keys.
    turn = store.add(f"fastfold/{what}/turn/{rank}", 1)
    place, mine = f"fastfold/{what}/{turn}", digest(own)
    store.set(f"{place}/facts/{rank}", json.dumps(own))
    store.set(f"{place}/digest/{rank}", mine)
    for other in range(dist.get_world_size()):
        if store.get(f"{place}/digest/{other}").decode() != mine:
            theirs = parse_json(store.get(f"{place}/facts/{other}"), f"rank {other}")
            raise ConfigError(f"{problem}: {differences(own, theirs, rank, other)}")
