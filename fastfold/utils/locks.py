"""Locks between processes, which the system releases when their process ends."""

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
        WriteError: The file system does not support locks, or the file cannot be created.
    """
    try:
        lock.acquire()
    except Timeout:
        raise
    except NotImplementedError as error:
        raise WriteError(
            f"the file system of {lock.lock_file} does not support locks, so processes could overwrite each other's "
            "files; choose another folder"
        ) from error
    except OSError as error:
        raise output_error(Path(lock.lock_file), "lock", error) from error
    try:
        yield
    finally:
        lock.release()
