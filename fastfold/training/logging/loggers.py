"""Loggers of a run's numbers: JSON lines, CSV, TensorBoard, or any other subclass of :class:`Logger`.

Entries are in the order of steps. A resumed run repeats the steps after its checkpoint, so loggers first drop the
entries of these steps, and no curve has a step twice.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastfold.errors import InputError, OutputError
from fastfold.training.logging.tensorboard import read_steps, record, scalar_event, text_event, version_event
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.foreign_text import json_object_or_none, table_rows

AnyPath = str | os.PathLike[str]
_RESERVED = ("step", "time", "event")


class Logger(ABC):
    """Destination of a run's numbers; subclass it for other destinations. By default only numbers are logged.

    A method that fails raises :class:`~fastfold.errors.OutputError`; the run continues.
    """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step by name; a slash groups names, as in ``valid/lddt_ca``."""

    def event(self, step: int, text: str) -> None:  # noqa: B027
        """Log an event as text."""

    def resume_from(self, step: int) -> None:  # noqa: B027
        """Drop all entries at or after a step, the next one to run; 1 for a new run."""

    def close(self) -> None:  # noqa: B027
        """Finish writing."""


class JsonLinesLogger(Logger):
    """Logger of one JSON object per line: ``step``, ``time`` (seconds since 1970), and the numbers or ``event``.

    Numbers that are not finite are null, because JSON does not allow NaN. Lines are not buffered, so a killed run loses
    none. The file is appended to if it exists.
    """

    def __init__(self, path: AnyPath) -> None:
        self._path = Path(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        _check_names(values)
        self._append(step, {key: float(x) if math.isfinite(x) else None for key, x in values.items()})

    def event(self, step: int, text: str) -> None:
        self._append(step, {"event": text})

    def _append(self, step: int, values: Mapping[str, Any]) -> None:
        entry = {"step": step, "time": round(time.time(), 3), **values}
        _append(self._path, json.dumps(entry, ensure_ascii=False).encode() + b"\n")

    def resume_from(self, step: int) -> None:
        data = _contents(self._path)
        kept = 0
        for line in data.splitlines(keepends=True):
            entry = _entry(line)
            if entry is None or entry["step"] >= step:
                break
            kept += len(line)
        _cut(self._path, kept, len(data))


def read_json_lines(path: AnyPath) -> list[dict[str, Any]]:
    """Read the entries of :class:`JsonLinesLogger`; an incomplete last line is skipped.

    Raises:
        InputError: The file cannot be read, or another line is invalid.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    entries = []
    for number, line in enumerate(lines, 1):
        entry = _entry(line)
        if entry is not None:
            entries.append(entry)
        elif number < len(lines) or line.endswith(b"\n"):
            raise InputError("expected an entry of a training run; delete the line", path=path, line=number)
    return entries


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line, or None if it is invalid or incomplete."""
    entry = json_object_or_none(line) or {}
    sound = type(entry.get("step")) is int and line.endswith(b"\n")
    return entry if sound else None


class CsvLogger(Logger):
    """Logger of a table with one row per entry, for spreadsheets; events are left out.

    A new name adds a column: the file is rewritten atomically with a longer header. The file is appended to if it
    exists.
    """

    def __init__(self, path: AnyPath) -> None:
        self._path = Path(path)
        self._columns = self._rows()[0]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        _check_names(values)
        cells = {"step": str(step), **{name: repr(float(x)) for name, x in values.items()}}
        if not cells.keys() <= set(self._columns) or not self._path.exists():
            columns, rows = self._rows()
            columns = list(dict.fromkeys([*columns, *cells]))
            padded = [row + [""] * (len(columns) - len(row)) for row in rows]
            write_atomic(self._path, _csv([columns, *padded]))
            self._columns = columns
        _append(self._path, _csv([[cells.get(name, "") for name in self._columns]]).encode())

    def resume_from(self, step: int) -> None:
        columns, rows = self._rows()
        kept = [row for row in rows if row[0].isdecimal() and int(row[0]) < step]
        if self._path.exists():
            write_atomic(self._path, _csv([columns, *kept]) if kept else "")
        self._columns = columns if kept else []

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        """Read header and rows of the file; an incomplete last row is skipped."""
        text = _contents(self._path).decode("utf-8", errors="replace")
        table = [cells for _, cells in table_rows(text[: text.rfind("\n") + 1], self._path, ",")]
        return (table[0], table[1:]) if table else ([], [])


class TensorBoardLogger(Logger):
    """Logger of TensorBoard event files, one per start of the run: ``tensorboard --logdir DIRECTORY`` shows them."""

    def __init__(self, directory: AnyPath) -> None:
        self._directory = Path(directory)
        # TensorBoard reads the files of a folder in the order of their names.
        self._path = self._directory / f"events.out.tfevents.{time.time_ns():020}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        _check_names(values)
        self._append(scalar_event(time.time(), step, values))

    def event(self, step: int, text: str) -> None:
        self._append(text_event(time.time(), step, "events", text))

    def _append(self, event: bytes) -> None:
        if not self._path.exists():
            _append(self._path, record(version_event(time.time())))
        _append(self._path, record(event))

    def resume_from(self, step: int) -> None:
        for path in sorted(self._directory.glob("events.out.tfevents.*")):
            data = _contents(path)
            kept = next(offset for offset, logged in read_steps(data) if logged < 0 or logged >= step)
            _cut(path, kept, len(data))


class LoggerGroup(Logger):
    """Group of loggers; a failing logger stops neither the others nor the run.

    ``report`` is called with one sentence when a logger starts to fail.
    """

    def __init__(self, loggers: Sequence[Logger], report: Callable[[str], None]) -> None:
        self._loggers, self._report = list(loggers), report
        self._failing: set[int] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda logger: logger.log(step, values))

    def event(self, step: int, text: str) -> None:
        self._each(lambda logger: logger.event(step, text))

    def resume_from(self, step: int) -> None:
        self._each(lambda logger: logger.resume_from(step))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, action: Callable[[Logger], None]) -> None:
        for i, logger in enumerate(self._loggers):
            try:
                action(logger)
                self._failing.discard(i)
            except OutputError as error:
                if i not in self._failing:
                    self._report(f"numbers are lost until this is fixed: {error}")
                self._failing.add(i)


def _check_names(values: Mapping[str, float]) -> None:
    for name in _RESERVED:
        if name in values:
            raise ValueError(f"the name {name!r} is reserved; choose another one")


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _contents(path: Path) -> bytes:
    """Read a file; empty if it does not exist."""
    with _writing(path), suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _append(path: Path, data: bytes) -> None:
    """Append data to a file, all of it or nothing."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            if file.write(data) != len(data):
                file.truncate(before)
                raise OSError(None, "the disk is full")


def _cut(path: Path, size: int, current: int) -> None:
    with _writing(path):
        if size < current:
            os.truncate(path, size)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot write {str(path)!r}: {error.strerror}; free some space or make it writable"
        raise OutputError(problem) from error
