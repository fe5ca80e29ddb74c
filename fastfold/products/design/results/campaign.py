"""Campaign of designs: trajectories that several processes share in one folder, until enough are accepted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
    identity: str  #: Hash of its design, and the seed
    settings: str  #: Hash of the settings of its folds and filters
    ended: str  #: Stage after which it was given up; empty for one that was folded
    rows: Sequence[dict[str, Any]]  #: Rows of the table: its design, and the other program's sequences

    @property
    def accepted(self) -> int:
        """Number of sequences that pass all filters."""
        return sum(row.get("filters") == PASSED for row in self.rows)


class Campaign:
    """Records of a campaign's trajectories in a results folder, shared by all processes that use it.

    Args:
        output: Folder of results.
        settings: Hash of the settings of folds and filters; trajectories with others do not count.
    """

    def __init__(self, output: Path, settings: str) -> None:
        self.folder, self.settings = ResultsFolder(output), settings
        self._records = prepare_output_directory(self.folder.state / _RECORDS)

    def claimed(self, name: str) -> AbstractContextManager[bool]:
        """Yield True if no other process works on a trajectory, and keep others away meanwhile."""
        return self.folder.claimed(name)

    def find(self, name: str, identity: str) -> Trajectory | None:
        """Return a finished trajectory of a design; None if there is none with the campaign's settings."""
        record = _read(self._records / f"{name}.json")
        is_own = record is not None and (record.identity, record.settings) == (identity, self.settings)
        return record if is_own else None

    def add(self, trajectory: Trajectory) -> None:
        """Record a finished trajectory, or raise WriteError."""
        write_atomic(self._records / f"{trajectory.name}.json", json.dumps(asdict(trajectory)))

    def trajectories(self) -> list[Trajectory]:
        """Return all finished trajectories of all processes with the campaign's settings, by name."""
        records = map(_read, sorted(self._records.glob("*.json")))
        return [record for record in records if record is not None and record.settings == self.settings]

    @property
    def accepted(self) -> int:
        """Number of accepted sequences so far, which reads the records of all trajectories."""
        return sum(one.accepted for one in self.trajectories())


def all_rows(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Return the rows of all trajectories in the order of the table."""
    return sorted_rows([row for one in trajectories for row in one.rows])


def _read(path: Path) -> Trajectory | None:
    content = json_object_or_none(path)
    try:
        return None if content is None else Trajectory(**content)
    except TypeError:
        return None
