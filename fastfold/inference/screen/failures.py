"""``failures.tsv``: one line for each target of a results folder that could not be folded."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastfold.data.targets import safe_stem
from fastfold.errors import InputError, PlaceError
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.report.write import FAILURES
from fastfold.utils.atomic_files import output_error, write_atomic

NAME = FAILURES
_COLUMNS = ("target", "reason")


@dataclass
class FailuresFile:
    """Table of failed targets, to which several runs add. A target that is folded later is removed.

    Writes are limited so that they take a small part of the time.
    """

    folder: ResultsFolder
    _changed: dict[str, str | None] = field(default_factory=dict, init=False)
    _next: float = field(default=0.0, init=False)

    def add(self, target: str, reason: str) -> None:
        """Add a target with the reason, written now or later, replacing its earlier line."""
        self._changed[target] = " ".join(reason.split())
        if time.monotonic() >= self._next:
            with contextlib.suppress(PlaceError):  # reported by the last flush
                self.flush()

    def add_records(self, errors: Iterable[InputError]) -> None:
        """Add records that cannot be read, by the names that their targets would have."""
        for error in errors:
            if error.record:
                self.add(safe_stem(error.record), str(error))

    def remove(self, target: str) -> None:
        """Remove a folded target with the next :meth:`flush`."""
        self._changed[target] = None

    def flush(self) -> None:
        """Write the table with all changes, or raise WriteError; remove the file if it has no lines."""
        if not self._changed:
            return
        path, start = self.folder.path / NAME, time.monotonic()
        with self.folder.locked():
            lines: dict[str, str] = {}
            with contextlib.suppress(OSError, UnicodeDecodeError):
                for line in path.read_text(encoding="utf-8").splitlines()[1:]:
                    target, _, reason = line.partition("\t")
                    lines[target] = reason
            before = dict(lines)
            for target, changed in self._changed.items():
                lines.pop(target, None)
                if changed is not None:
                    lines[target] = changed
            if lines:
                if lines != before:
                    rows = [_COLUMNS, *lines.items()]
                    write_atomic(path, "".join("\t".join(row) + "\n" for row in rows))
            else:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    kind = IsADirectoryError(errno.EISDIR, "") if path.is_dir() else error
                    raise output_error(path, "remove", kind) from error
            self._changed.clear()
        end = time.monotonic()
        self._next = end + 20 * (end - start)
