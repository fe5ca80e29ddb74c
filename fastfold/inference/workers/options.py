"""Options of a screen other than the fold's: its targets, its workers, and a part of the targets (``--shard 2/8``)."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import check_options, option
from fastfold.utils.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from fastfold.data.targets import Target


@dataclass(frozen=True)
class Shard:
    """One of several parts, by its number from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        """Return the part as the option names it."""
        return f"{self.index}/{self.count}"

    def of(self, targets: Sequence[Target], costs: Sequence[float]) -> list[int]:
        """Return the targets of this part as indices, in the order of the input.

        Every target is in one part, independent of the order of the input, and the parts cost about the same. In the
        order of cost, each target is added to the part with the lowest cost so far (longest processing time first,
        Graham 1969).
        """
        from fastfold.utils.hashing import input_hash  # NumPy is slow to import

        digests = [
            input_hash(target.record, [chain.sequence for chain in target.chains]) for target in targets
        ]
        parts = [(0.0, number) for number in range(1, self.count + 1)]
        mine = []
        for i in sorted(range(len(targets)), key=lambda i: (-costs[i], digests[i])):
            cost, number = parts[0]
            heapq.heapreplace(parts, (cost + costs[i], number))
            if number == self.index:
                mine.append(i)
        return sorted(mine)


def parse_shard(text: str) -> Shard:
    """Parse a part written as ``2/8``, the second of eight, or raise ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,6})/(\d{1,6})\s*", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(
            f"shard {text[:40]!r}: write I/N with I from 1 to N, for example 1/8 and so on to 8/8"
        )
    return Shard(int(match[1]), int(match[2]))


_file = partial(option, default=None, parse=Path, metavar="FILE")
_workers = partial(option, default=None, group="workers")


@dataclass(frozen=True)
class TargetLists:
    """Sources of a screen's targets, which can be combined; the help of each option explains it.

    ``inputs`` are files for :func:`fastfold.data.queries.read.read_targets`, and tables of partners
    (:func:`fastfold.data.queries.pairs.read_pair_table`).
    """

    inputs: tuple[Path, ...] = ()
    all_vs_all: Path | None = _file(help="fold every pair of these proteins")
    homodimers: bool = option(default=False, help="with --all-vs-all: each protein with itself as well")
    baits: Path | None = _file(help="fold each of these proteins ...")
    candidates: tuple[Path, ...] = option(
        default=(),
        nargs="+",
        parse=Path,
        metavar="FILE",
        help="... with each of these; of several files, with one protein of each in every way",
    )
    proteins: Path | None = _file(help="proteins that tables and lists of names refer to")

    def __post_init__(self) -> None:
        if (self.baits is None) == bool(self.candidates):
            raise ConfigError(
                "`baits` and `candidates` need each other: every bait is folded with every candidate"
            )
        if self.homodimers and self.all_vs_all is None:
            raise ConfigError(
                "`homodimers` needs `all_vs_all`; a bait that is also a candidate is paired with itself already"
            )
        if not (self.inputs or self.all_vs_all or self.baits):
            raise ConfigError("no targets given; fastfold screen --help explains the command")


@dataclass(frozen=True)
class ScreenOptions:
    """Workers and limits of a screen; the help of each option explains it.

    Limits are in seconds, and in bytes of a target's process. The address of a Ray cluster is that of
    :func:`fastfold.inference.workers.ray_cluster.connect`; None for this machine.
    """

    workers: int | None = _workers(
        bounds=(1, 10_000),
        help="processes that fold (default: one per GPU; without GPUs one, or one per machine of the cluster)",
    )
    ray: str | None = _workers(
        nargs="?",
        bare="auto",
        metavar="ADDRESS",
        help="use a Ray cluster: HOST:PORT, auto for the one of this machine, local to start one for this run",
    )
    cpus_per_worker: int | None = _workers(
        bounds=(1, 10_000), help="CPUs of each worker (default: equal parts of all)"
    )
    time_limit: float | None = _workers(
        parse=parse_duration,
        metavar="TIME",
        help="give a target up after this time: 90s, 15m, 2h (default: none)",
    )
    memory_limit: int | None = _workers(
        parse=parse_bytes,
        metavar="SIZE",
        help="give a target up when its process holds more of the host's memory: 16GiB (default: none)",
    )
    shard: Shard | None = option(
        default=None,
        parse=parse_shard,
        group="shards",
        metavar="I/N",
        help="fold the I-th of N parts of about equal work, for job arrays",
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def has_limits(self) -> bool:
        """True if a target has a limit of time or memory, which targets that share a worker's task could not keep."""
        return self.time_limit is not None or self.memory_limit is not None
