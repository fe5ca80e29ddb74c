"""Locks between processes, which the system releases when their process ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fastfold.errors import WriteError
from fastfold.utils.atomic_files import output_error


@contextlib.contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a folder of downloads; wait for another process that downloads into it."""
    path = folder / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(FileLock(path, timeout=0)))
        except Timeout:
            say(f"waiting for another process that downloads into {folder}")
            stack.enter_context(held(FileLock(path)))
        yield


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
