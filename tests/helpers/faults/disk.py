"""Faults at the n-th step of a command's writing, in all its processes together.

A step is a call that opens a file for writing, writes to it, syncs, renames, links, or makes a folder, below one
folder. :func:`install` counts steps in a log whose lines have one length: the end of a line that was appended gives its
number, in any process. Libraries that write by themselves, such as SQLite, are not seen.

``sitecustomize.py`` beside this module installs the fault in new interpreters, so this module imports no other.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "FASTFOLD_TEST_FAULT"
_LINE = 240
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EVENTS = {"os.rename": 1, "os.link": 1, "os.symlink": 1, "os.mkdir": 0, "os.truncate": 0}
"""Argument that is the path that changes, by the name of Python's audit event."""

Kind = Literal["none", "ENOSPC", "EIO", "SIGKILL", "flock", "cut", "slow"]


@dataclass(frozen=True)
class Fault:
    """A fault of a command.

    Attributes:
        folder: Folder whose steps count.
        log: File of steps.
        kind: ``ENOSPC`` fails from a step on, ``EIO`` fails one step, ``SIGKILL`` ends the process at a step, ``flock``
            refuses all locks as a file system without them does. Others, of connections, leave the disk alone.
        step: Number of the step, from 1.
    """

    folder: str
    log: str
    kind: Kind = "none"
    step: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables that install the fault in a command and its new interpreters."""
        return {VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(_search_path())}

    def end(self) -> None:
        """End the fault, as when a full disk is cleared."""
        Path(f"{self.log}.ended").touch()

    def steps(self) -> list[str]:
        """Return the steps so far, a line each: what was done to which path."""
        text = Path(self.log).read_text() if Path(self.log).exists() else ""
        return [line.rstrip() for line in text.splitlines()]


def _search_path() -> Iterator[str]:
    here = Path(__file__).resolve()
    yield str(here.parent / "site")
    yield str(here.parents[3])
    if known := os.environ.get("PYTHONPATH"):
        yield known


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process fail as the environment says; do nothing without a fault there."""
    if VARIABLE not in environment:
        return
    fault = Fault(**json.loads(environment[VARIABLE]))
    _Steps(fault).install()


class _Steps:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._root = os.path.join(os.path.realpath(fault.folder), "")
        self._open_log()

    def _open_log(self) -> None:
        # A child would share the position with its parent otherwise.
        self._log = os.open(self.fault.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def counts(self, path: Any) -> bool:
        """Return True if a path, or an open descriptor's, is below the folder."""
        try:
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        except (OSError, TypeError):
            return False
        name = os.fsdecode(name)
        return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name)).startswith(
            self._root
        )

    def step(self, what: str, path: Any) -> bool:
        """Count a step, and raise the fault's error; return True for a write that is the last before its end."""
        if what == "os.mkdir" and os.path.isdir(path):
            return False  # the question whether it is there
        shown = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        line = f"{what} {shown.replace(self._root, '')}".encode("ascii", "replace")[: _LINE - 1]
        _os_write(self._log, line.ljust(_LINE - 1) + b"\n")
        number = os.lseek(self._log, 0, os.SEEK_CUR) // _LINE
        kind, at = self.fault.kind, self.fault.step
        if os.path.exists(f"{self.fault.log}.ended"):
            return False
        if kind == "SIGKILL" and number == at and what != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        # A full disk still opens the files that it has, and takes a part of the first write.
        is_full = kind == "ENOSPC" and number >= at and not (what == "open" and os.path.exists(path))
        is_half = what == "write" and number == at and kind in ("ENOSPC", "SIGKILL")
        if not is_half and (is_full or (kind == "EIO" and number == at)):
            code = getattr(errno, kind)
            raise OSError(code, os.strerror(code), shown)
        return is_half

    def write(self, descriptor: int, data: Any, write: Callable[[Any], int]) -> int:
        """Write data by a function, or the half of it that a fault lets through."""
        if not self.step("write", descriptor):
            return write(data)
        view = memoryview(data).cast("B")
        written = write(view[: len(view) // 2])
        if self.fault.kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def install(self) -> None:
        """Replace the functions that write."""
        os.register_at_fork(after_in_child=self._open_log)
        os_fsync = os.fsync

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if isinstance(flags, int) and flags & _WRITES and self.counts(path):
                    self.step("open", path)
            elif event in _EVENTS and self.counts(path := arguments[_EVENTS[event]]):
                self.step(event, path)

        def write(descriptor: int, data: Any) -> int:
            if not self.counts(descriptor):
                return _os_write(descriptor, data)
            return self.write(descriptor, data, lambda part: _os_write(descriptor, part))

        def fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            if self.counts(number):
                self.step("fsync", number)
            os_fsync(number)

        def refuse(descriptor: Any, operation: int) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        class CountedFile(io.FileIO):
            def write(file, data: Any) -> int:
                return self.write(file.fileno(), data, super().write)

        def open_file(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not set(mode) & set("wax+") or not self.counts(file):
                return _io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = CountedFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
            text.mode = mode  # type: ignore[misc]
            return text

        sys.addaudithook(audit)
        os.write, os.fsync = write, fsync
        builtins.open = io.open = open_file  # type: ignore[assignment]
        if self.fault.kind == "flock":
            fcntl.flock = refuse  # type: ignore[assignment]


_os_write, _io_open = os.write, io.open
