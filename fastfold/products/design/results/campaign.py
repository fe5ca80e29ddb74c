"""Campaign of designs: trajectories that several processes share in one folder, until enough are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.products.design.results.table import PASSED, sorted_rows
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.foreign_text import json_object_or_none

_RECORDS = "designs"


@dataclass(frozen=True)
class Trajectory:
    """Finished trajectory of a campaign."""

    name: str  #: Name of its files
    identity: str  #: Hash of its design, ``-``, and the seed
    settings: str  #: Hash of the settings of its folds and filters
    ended: str  #: Stage after which it was given up; empty for one that was folded
    rows: Sequence[dict[str, Any]]  #: Rows of the table: its design, and the other program's sequences

    @property
    def accepted(self) -> int:
        """Number of sequences that pass all filters."""
        return sum(row.get("filters") == PASSED for row in self.rows)

    @property
    def seed(self) -> int:
        """Seed of its design."""
        return int(self.identity.rpartition("-")[2])


class Campaign:
    """Records of a campaign's trajectories in a results folder, shared by all processes that use it.

    Args:
        output: Folder of results.
        settings: Hash of the settings of folds and filters; trajectories with others do not count.
        identity: Returns the identity of a trajectory of the campaign's design by its seed; others do not count.
    """

    def __init__(self, output: Path, settings: str, identity: Callable[[int], str]) -> None:
        self.folder, self.settings, self.identity = ResultsFolder(output), settings, identity
        self._records = prepare_output_directory(self.folder.state / _RECORDS)

    def claimed(self, name: str) -> AbstractContextManager[bool]:
        """Yield True if no other process works on a trajectory, and keep others away meanwhile."""
        return self.folder.claimed(name)

    def find(self, name: str) -> Trajectory | None:
        """Return a finished trajectory; None if there is none of the campaign's design and settings."""
        record = _read(self._records / f"{name}.json")
        return record if record is not None and self._is_own(record) else None

    def add(self, trajectory: Trajectory) -> None:
        """Record a finished trajectory, or raise WriteError."""
        write_atomic(self._records / f"{trajectory.name}.json", json.dumps(asdict(trajectory)))

    def trajectories(self) -> list[Trajectory]:
        """Return all finished trajectories of all processes of the campaign, by name."""
        records = map(_read, sorted(self._records.glob("*.json")))
        return [record for record in records if record is not None and self._is_own(record)]

    @property
    def accepted(self) -> int:
        """Number of accepted sequences so far, which reads the records of all trajectories."""
        return sum(one.accepted for one in self.trajectories())

    def _is_own(self, record: Trajectory) -> bool:
        return record.settings == self.settings and record.identity == self.identity(record.seed)


def all_rows(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Return the rows of all trajectories in the order of the table."""
    return sorted_rows([row for one in trajectories for row in one.rows])


def _read(path: Path) -> Trajectory | None:
    content = json_object_or_none(path)
    try:
        record = None if content is None else Trajectory(**content)
        return record if record is not None and record.seed >= 0 else None
    except (AttributeError, TypeError, ValueError):
        return None
