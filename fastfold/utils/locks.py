"""Locks between processes, which the system releases when their process ends."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fastfold.errors import WriteError
from fastfold.utils.atomic_files import output_error

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@contextlib.contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a folder of downloads; wait for another process that downloads into it."""
    path = folder / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(path, timeout=0))
        except Timeout:
            say(f"waiting for another process that downloads into {folder}")
            stack.enter_context(held(path))
        yield


@contextlib.contextmanager
def held(path: Path, *, timeout: float = -1, is_reentrant: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing.

    Args:
        path: The file.
        timeout: Seconds to wait for another process that holds it; negative to wait without an end.
        is_reentrant: True if this process may hold the lock several times at once.

    Raises:
        Timeout: Another process holds it.
        WriteError: The file system does not support locks, or the file cannot be created.
    """
    # A file in place of a lock would stay after a killed process.
    lock = FileLock(path, timeout=timeout, is_singleton=is_reentrant, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise output_error(path, "lock", error) from error
        raise WriteError(
            f"the file system of {path} does not support locks, so processes could overwrite each other's files; "
            "choose another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
