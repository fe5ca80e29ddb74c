"""Lock of a run's folder: one run at a time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fastfold.errors import ConfigError, FastFoldError
from fastfold.parallel import DistributedContext
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.locks import held

LOCK, OWNER = ".lock", "owner.json"  #: Names of the lock file and of the file that describes its latest owner


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
                stack.enter_context(held(FileLock(folder / LOCK, timeout=0)))
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
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return f" (process {int(owner['pid'])} on {owner['host']}, started {owner['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
