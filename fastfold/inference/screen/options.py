"""What a screen is told beside how to fold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastfold.errors import ConfigError
from fastfold.inference.screen.shard import Shard


@dataclass(frozen=True)
class TargetLists:
    """Where the targets of a screen come from. All that are given count together.

    Attributes:
        inputs: Files as :func:`fastfold.data.queries.read.read_targets` takes them, and tables of partners
            (:func:`fastfold.data.queries.pairs.read_pair_table`).
        proteins: Proteins that the tables of partners name; None if they have sequences.
        all_vs_all: Proteins, every pair of which is folded.
        homodimers: Whether ``all_vs_all`` pairs each protein with itself as well.
        baits: Proteins that are folded with each of the ``candidates``.
        candidates: See there.
    """

    inputs: tuple[Path, ...] = ()
    proteins: Path | None = None
    all_vs_all: Path | None = None
    homodimers: bool = False
    baits: Path | None = None
    candidates: Path | None = None

    def __post_init__(self) -> None:
        if (self.baits is None) != (self.candidates is None):
            raise ConfigError(
                "--baits and --candidates are given together: every bait is folded with every candidate"
            )
        if self.homodimers and self.all_vs_all is None:
            raise ConfigError(
                "--homodimers belongs to --all-vs-all; a bait that is a candidate too is its own partner"
            )
        if not (self.inputs or self.all_vs_all or self.baits):
            raise ConfigError("no targets given; fastfold screen --help explains the command")


@dataclass(frozen=True)
class ScreenOptions:
    """Where and within which limits a screen runs.

    Attributes:
        workers: Number of processes that fold; None for one per GPU, or one (on each machine of a cluster).
        ray: Address of a Ray cluster (:func:`fastfold.inference.screen.ray_cluster.connect`); None for this machine.
        cpus_per_worker: CPUs of each; None for equal parts of what there is, one if it has a GPU.
        time_limit: Seconds that a target may take; None for any time.
        memory_limit: Bytes of the host's memory that the process of a target may hold; None for any amount.
        shard: The part of the targets that is folded; None for all.
    """

    workers: int | None = None
    ray: str | None = None
    cpus_per_worker: int | None = None
    time_limit: float | None = None
    memory_limit: int | None = None
    shard: Shard | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "cpus_per_worker"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 10_000:
                raise ConfigError(f"{name} must be from 1 to 10,000, got {value}")
