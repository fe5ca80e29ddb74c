"""Locks between processes, which the system releases when their process ends."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from fastfold.errors import WriteError
from fastfold.utils.atomic_files import output_error

# The error that replaces it says more.
warnings.filterwarnings("ignore", "flock not supported", UserWarning)


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
        # Newer versions of filelock replace a lock that the file system lacks by a file, which a killed process leaves.
        is_supported = not isinstance(lock, SoftFileLock)
    except Timeout:
        raise
    except NotImplementedError:
        is_supported = False
    except OSError as error:
        raise output_error(Path(lock.lock_file), "lock", error) from error
    try:
        if not is_supported:
            raise WriteError(
                f"the file system of {lock.lock_file} does not support locks, so processes could overwrite each "
                "other's files; choose another folder"
            )
        yield
    finally:
        lock.release()
