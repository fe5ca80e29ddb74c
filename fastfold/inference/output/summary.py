"""``summary.tsv``: one line for each prediction in a results folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fastfold.errors import PlaceError
from fastfold.inference.output.results_folder import ResultsFolder, TargetResults
from fastfold.utils.atomic_files import write_atomic

COLUMNS = (
    "target",
    "model",
    "seed",
    "rank",
    "length",
    "plddt",
    "ptm",
    "iptm",
    "ipsae_max",
    "clashes",
    "has_clash",
    "relaxed_energy",
    "seconds",
    "peak_memory",
    "files",
    "sample",
)
"""Columns of the table. ``clashes`` counts pairs of atoms of different chains, ``relaxed_energy`` is in kJ/mol,
``peak_memory`` in MiB; ``files`` is the common part of the file names, ``sample`` method and number of a sample."""


@dataclass
class SummaryFile:
    """Table of a results folder, updated target by target.

    Writes are limited so that they take a small part of the time.
    """

    folder: ResultsFolder  #: The results folder
    _changed: dict[str, TargetResults] = field(default_factory=dict)
    _next: float = 0.0

    @property
    def path(self) -> Path:
        """Path of the table."""
        return self.folder.path / "summary.tsv"

    def update(self, target: TargetResults) -> None:
        """Update a target's lines, written now or later; :meth:`flush` reports errors."""
        self._changed[target.stem] = target
        if time.monotonic() >= self._next:
            with contextlib.suppress(PlaceError):
                self.flush()

    def flush(self) -> None:
        """Write the table with all changes.

        Raises:
            WriteError: The table cannot be written; the old one is unchanged.
        """
        if not self._changed:
            return
        start = time.monotonic()
        with self.folder.locked():
            lines: dict[str, list[str]] = {}
            with contextlib.suppress(OSError, UnicodeDecodeError):
                # Opening a pipe would block while the folder's lock is held.
                text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
                for line in text.splitlines()[1:]:
                    lines.setdefault(line.partition("\t")[0], []).append(line)
            for stem, target in self._changed.items():
                lines[stem] = [
                    _line(stem, record.rank, record.scores, target.name(record, ""))
                    for record in target.records()
                ]
            table = ["\t".join(COLUMNS), *(line for found in lines.values() for line in found)]
            write_atomic(self.path, "\n".join(table) + "\n")
            self._changed.clear()
        end = time.monotonic()
        self._next = end + 20 * (end - start)


def score_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of scores: floats with four decimals, None as an empty cell.

    Args:
        columns: Names of the columns.
        rows: Values by column.
    """
    cells = (
        [f"{x:.4f}" if isinstance(x, float) else x for x in map(row.__getitem__, columns)] for row in rows
    )
    return tab_separated([columns, *cells])


def tab_separated(lines: Iterable[Sequence[Any]]) -> str:
    """Return lines of cells as text: None as an empty cell, white space within a cell as one space."""
    return "".join("\t".join(map(_text, line)) + "\n" for line in lines)


def mean_score(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    numbers = [float(value) for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _line(stem: str, rank: int, scores: Mapping[str, Any], files: str) -> str:
    values = {**scores, "target": stem, "rank": rank, "files": files}
    return "\t".join(_cell(values.get(column)) for column in COLUMNS)


def _cell(value: Any) -> str:
    return _text(f"{value:.4g}" if isinstance(value, float) else value)


def _text(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())


def read_summary(path: Path) -> list[dict[str, str]]:
    """Read the lines of a table by column; empty if the file does not exist."""
    try:
        if not path.is_file():
            return []
        header, *lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [dict(zip(header.split("\t"), line.split("\t"), strict=False)) for line in lines]


def aligned_table(lines: Iterable[Mapping[str, str]], columns: Iterable[str]) -> str:
    """Format lines of a table for a terminal, with aligned columns; empty cells as ``-``."""
    rows = [list(columns)]
    rows += [[line.get(column, "") or "-" for column in rows[0]] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
