"""Locks between processes, which the system opens when their process ends, however that happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fastfold.errors import WriteError
from fastfold.utils.atomic_files import output_error


@contextlib.contextmanager
def held(lock: FileLock) -> Iterator[None]:
    """Hold a lock.

    Raises:
        Timeout: Another process holds it.
        WriteError: The file system has no locks, or the file cannot be made.
    """
    try:
        lock.acquire()
    except Timeout:
        raise
    except NotImplementedError as error:
        raise WriteError(
            f"the file system of {lock.lock_file} has no locks, so that processes could overwrite each other's "
            "files; choose another folder"
        ) from error
    except OSError as error:
        raise output_error(Path(lock.lock_file), "lock", error) from error
    try:
        yield
    finally:
        lock.release()
