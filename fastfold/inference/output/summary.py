"""Tables of a results folder: ``summary.tsv`` of its predictions, and ``failures.tsv`` of failed targets."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from fastfold.data.targets import safe_stem
from fastfold.errors import InputError, PlaceError
from fastfold.inference.output.results_folder import ResultsFolder, TargetResults
from fastfold.inference.output.score_files import MAX_SCORES_BYTES
from fastfold.protein.metrics.scores import SUMMARY_SCORES
from fastfold.protein.validation import LISTED_GEOMETRY
from fastfold.utils.atomic_files import output_error, write_atomic

FAILURES = "failures.tsv"  #: Name of the table of failed targets

COLUMNS = (
    *("target", "model", "seed", "rank", "length", *(one.summary for one in SUMMARY_SCORES)),
    *("has_clash", "relaxed_energy", "seconds", "peak_memory", "files", "sample", "name"),
    *(*LISTED_GEOMETRY, "geometry"),
)
"""Columns of the table. ``clashes`` counts pairs of atoms of different chains, ``relaxed_energy`` is in kJ/mol,
``peak_memory`` in MiB; ``target`` and ``files`` are the common parts of the file names of a target and of a
prediction, ``name`` is the target's name in its own letters, ``sample`` method and number of a sample. ``geometry`` is
``ok``, or the reasons why the structure is not that of a protein. Figures of geometry are before relaxation."""


class _SharedTable:
    """Table to which several runs add, by target. Writes are limited so that they take a small part of the time."""

    name: str  #: Name of the file
    head: str  #: Its first line

    def __init__(self, folder: ResultsFolder) -> None:
        self.folder, self.path = folder, folder.path / self.name
        self._changed: dict[str, Any] = {}
        self._next = 0.0

    def flush(self) -> None:
        """Write the table with all changes, or raise WriteError and leave the old one unchanged."""
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
            self._write(lines)
            self._changed.clear()
        end = time.monotonic()
        self._next = end + 20 * (end - start)

    def _change(self, target: str, value: Any) -> None:
        self._changed[target] = value
        if time.monotonic() >= self._next:
            with contextlib.suppress(PlaceError):  # reported by the last flush
                self.flush()

    def _write(self, lines: dict[str, list[str]]) -> None:
        """Write the present lines of the targets with the changes."""
        raise NotImplementedError

    def _write_lines(self, lines: Mapping[str, Sequence[str]]) -> None:
        rows = (self.head, *chain.from_iterable(lines.values()))
        write_atomic(self.path, "".join(f"{line}\n" for line in rows))


class SummaryFile(_SharedTable):
    """Table of a results folder with a line for each prediction."""

    name, head = "summary.tsv", "\t".join(COLUMNS)

    def update(self, target: TargetResults) -> None:
        """Update a target's lines, written now or later; :meth:`flush` reports errors."""
        self._change(target.stem, target)

    def _write(self, lines: dict[str, list[str]]) -> None:
        for stem, target in self._changed.items():
            lines[stem] = []
            for record in target.records():
                own = {"target": stem, "rank": record.rank, "files": target.name(record, "")}
                lines[stem].append("\t".join(_cell((record.scores | own).get(column)) for column in COLUMNS))
        self._write_lines(lines)


class FailuresFile(_SharedTable):
    """Table of a results folder with a line for each failed target; one that is folded later is removed."""

    name, head = FAILURES, "target\treason"

    def __init__(self, folder: ResultsFolder) -> None:
        super().__init__(folder)
        # Lines of records by the names of their targets: another target of such a name does not replace them.
        self._unread: dict[str, list[str]] = {}

    def add(self, target: str, reason: str) -> None:
        """Add a target with the reason, written now or later, replacing its earlier line."""
        self._change(target, [_failure(target, reason)])

    def add_records(self, errors: Iterable[InputError]) -> None:
        """Add records that cannot be read, by the names that their targets would have.

        Errors of whole files and of lines of lists are without a target, and replace those of an earlier run.
        """
        self._changed[""] = []
        for error in errors:
            target = safe_stem(error.record) if error.record else ""
            self._unread.setdefault(target, []).append(_failure(target, str(error)))
            self._change(target, [])

    def remove(self, target: str) -> None:
        """Remove a folded target with the next :meth:`flush`, and the table if it has no lines."""
        self._changed[target] = []

    def _write(self, lines: dict[str, list[str]]) -> None:
        before = dict(lines)
        for target, changed in self._changed.items():
            lines.pop(target, None)
            if failures := [*changed, *self._unread.get(target, ())]:
                lines[target] = failures
        if not lines:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                kind = IsADirectoryError(errno.EISDIR, "") if self.path.is_dir() else error
                raise output_error(self.path, "remove", kind) from error
        elif lines != before:
            self._write_lines(lines)


def _failure(target: str, reason: str) -> str:
    return f"{target}\t{' '.join(reason.split())}"


def score_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of scores: floats with four decimals, None and missing ones as empty cells."""
    cells = ([f"{x:.4f}" if isinstance(x, float) else x for x in map(row.get, columns)] for row in rows)
    return tab_separated([columns, *cells])


def tab_separated(lines: Iterable[Sequence[Any]]) -> str:
    """Return lines of cells as text: None as an empty cell, white space within a cell as one space.

    A cell that begins with a quotation mark is quoted, because programs would read up to the next one.
    """
    return "".join("\t".join(map(_text, line)) + "\n" for line in lines)


def mean_score(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    numbers = [float(value) for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _cell(value: Any) -> str:
    return _text(f"{value:.4g}" if isinstance(value, float) else value)


def _text(value: Any) -> str:
    text = "" if value is None else " ".join(str(value).split())
    return '"' + text.replace('"', '""') + '"' if text.startswith('"') else text


def _unquoted(cell: str) -> str:
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"'
    return cell[1:-1].replace('""', '"') if is_quoted else cell


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the lines of a tab-separated table, which may come from anywhere; none without a valid file."""
    try:
        is_whole = path.is_file() and path.stat().st_size <= MAX_SCORES_BYTES
        lines = path.read_text("utf-8").splitlines() if is_whole else []
    except (OSError, ValueError):
        return []
    header, *rows = [list(map(_unquoted, line.split("\t"))) for line in lines] or [[]]
    return [dict(zip(header, cells, strict=False)) for cells in rows]


def aligned_table(lines: Iterable[Mapping[str, str]], columns: Iterable[str]) -> str:
    """Format lines of a table for a terminal, with aligned columns; empty cells as ``-``."""
    rows = [list(columns)]
    rows += [[line.get(column, "") or "-" for column in rows[0]] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
