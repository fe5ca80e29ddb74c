"""Process of a run: signals that ask it to save its state and stop, and the lock of its folder."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import Timeout

from fastfold.errors import ConfigError, FastFoldError
from fastfold.parallel import DistributedContext
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.foreign_text import json_object_or_none
from fastfold.utils.locks import held

LOCK, OWNER = ".lock", "owner.json"  #: Names of the lock file and of the file that describes its latest owner
_NAMES = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals of batch systems before the time limit, of a closing terminal, and Ctrl-C."""

_AGAIN = b"stopping with a checkpoint after this step; press Ctrl-C again to stop at once\n"


class Interrupts:
    """Context manager that records the first of :data:`SIGNALS` in ``received``.

    Ignored signals stay ignored, such as Ctrl-C in background jobs. A second Ctrl-C has its usual effect. ``quiet``
    prints nothing at Ctrl-C, for all processes but the first.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        with suppress(ValueError):  # only the main thread may set handlers
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            if not self._quiet:
                with suppress(OSError):
                    os.write(2, _AGAIN)


@contextmanager
def owned(folder: Path, context: DistributedContext) -> Iterator[None]:
    """Lock a run's folder against other runs; the system releases the lock when the process ends.

    The folder is created if missing. The first process holds the lock; a failure is raised on all.

    Raises:
        ConfigError: Another run uses the folder; the message names its host and process.
        OutputError: The folder cannot be used.
        WriteError: A file in it cannot be written, or its file system does not support locks.
    """
    with ExitStack() as stack:
        problem: FastFoldError | None = None
        if context.is_rank_zero:
            try:
                prepare_output_directory(folder)
                stack.enter_context(held(folder / LOCK, timeout=0))
                started = datetime.now().astimezone().isoformat(timespec="seconds")
                owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
                write_atomic(folder / OWNER, json.dumps(owner, indent=1) + "\n")
            except Timeout:
                problem = ConfigError(
                    f"{folder} is in use by another run{_owner(folder)}; choose another trainer.out, or end "
                    "that run first"
                )
            except FastFoldError as error:
                problem = error
        of_first = context.gather(problem)[0]
        if of_first is not None:
            raise of_first
        yield


def _owner(folder: Path) -> str:
    """Return a description of the lock's owner, or an empty text."""
    owner = json_object_or_none(folder / OWNER) or {}
    try:
        return f" (process {int(owner['pid'])} on {owner['host']}, started {owner['started']})"
    except (ValueError, KeyError, TypeError):
        return ""
