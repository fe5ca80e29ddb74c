"""One file without a name: its room is reserved at once, it is mapped into memory, and threads read and write it.

Reads and writes by threads go through the same pages of the kernel as the map, so whatever was written last is read,
in whichever of these ways; that is tried out when the file is made.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

import torch
from torch import Tensor

from fastfold.errors import ConfigError, OutputError

PAGE = 4096
"""What is kept begins on multiples of this, so that a write of one thing reads nothing of another's pages first."""

_THREADS = 4
# The kernel reads no more ahead than its device takes at a time, however much it is asked for: 128 KiB at least.
_AHEAD = 1 << 17
_PIECE = 1 << 22


def map_file(folder: str, nbytes: int, *, keep: bool = False) -> tuple[mmap.mmap, int]:
    """A file of zeros without a name, in memory, whose blocks on the disk are reserved.

    Args:
        folder: On the disk.
        nbytes: Its size.
        keep: Whether to keep it open.

    Returns:
        The map, and the file's descriptor, -1 if it was closed.

    Raises:
        ConfigError: The system has no calls for it (Windows).
        OutputError: The disk has no room.
    """
    if not hasattr(os, "pwritev"):
        raise ConfigError(
            "memory on a disk needs Linux or macOS; leave out --offload-dir and nvme tiers here"
        )
    size = max(nbytes, 1)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A disk that fills up later would kill the process on a write to the map.
            _reserve(file, size)
            return mmap.mmap(file.fileno(), size), os.dup(file.fileno()) if keep else -1
    except OSError as error:
        raise OutputError(
            f"{folder}: no {size:,} bytes for the memory tier on this disk ({error.strerror}). Free some space or "
            "choose a folder on another disk; checkpoints written so far are intact"
        ) from error


def _reserve(file: IO[bytes], size: int) -> None:
    """Give a new file blocks on the disk; macOS has no call for it, so zeros are written there."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, _PIECE):
        file.write(bytes(min(_PIECE, size - start)))
    file.flush()


class DiskFile:
    """A reserved file, handed out in parts from its beginning.

    The file goes with this object, and with the process however that ends.

    Args:
        folder: On the disk.
        nbytes: Its size, each part rounded up to a multiple of :data:`PAGE`.

    Raises:
        OutputError: The disk has no room.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        self.map, self._file = map_file(folder, nbytes, keep=True)
        weakref.finalize(self, os.close, self._file)
        self.size, self.taken = len(self.map), 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="disk")
        self._coherent = self._try_out()

    def take(self, nbytes: int) -> int | None:
        """Where the next part begins; None if there is no room left."""
        start = self.taken
        if start + nbytes > self.size:
            return None
        self.taken += -(-nbytes // PAGE) * PAGE
        return start

    def read_ahead(self, start: int, nbytes: int) -> None:
        """Begin to bring a part into memory; threads ask the disk for all of it, piece by piece."""
        if not hasattr(os, "posix_fadvise"):  # macOS reads it when it is needed
            return
        for piece in range(start, start + nbytes, _PIECE):
            stop = min(piece + _PIECE, start + nbytes)
            self._threads.submit(self._ask, piece, stop)

    def in_thread(self, task: Callable[[], None]) -> Future[None]:
        """Run a function that reads or writes in one of the threads."""
        return self._threads.submit(task)

    def _ask(self, start: int, stop: int) -> None:
        for first in range(start - start % PAGE, stop, _AHEAD):
            os.posix_fadvise(self._file, first, min(_AHEAD, stop - first), os.POSIX_FADV_WILLNEED)

    def write(self, start: int, source: Tensor) -> None:
        """Write flat memory to a part; whole pages are not read before. Several threads may do so at a time.

        Args:
            start: Where, in bytes.
            source: Contiguous, on the host.
        """
        data = source.reshape(-1).view(torch.uint8).numpy().data
        if not self._coherent:
            self.map[start : start + len(data)] = bytes(data)
            return
        done = 0
        while done < len(data):
            done += os.pwritev(self._file, [data[done:]], start + done)

    def _try_out(self) -> bool:
        """Whether the map and the file are one, as on all file systems of disks and not on all of networks."""
        os.pwritev(self._file, [b"\x01"], 0)
        written = self.map[0] == 1
        self.map[0] = 0
        return written and os.preadv(self._file, [byte := bytearray(1)], 0) == 1 and byte == b"\x00"
