"""Anonymous file with reserved space, mapped into memory, and read and written by threads.

Threads access the file through the same pages of the kernel as the map, so both see the latest data. This is tested
when the file is created.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fastfold.errors import ConfigError, OutputError

PAGE = 4096  #: Alignment of parts in bytes, so that a write does not read pages of other parts

_THREADS = 4
# The kernel limits each read-ahead to its device's maximum, which is at least 128 KiB.
_AHEAD = 1 << 17
_PIECE = 1 << 22


def map_file(folder: str, nbytes: int, *, keep: bool = False) -> tuple[mmap.mmap, int]:
    """Create an anonymous file of zeros, map it into memory, and reserve its blocks on the disk.

    The result has the file's descriptor, which ``keep`` keeps open; else it is -1.

    Raises:
        ConfigError: The system does not support it (Windows).
        OutputError: The disk is full.
    """
    if not hasattr(os, "pwritev"):
        raise ConfigError(
            "memory on a disk needs Linux or macOS; leave out `offload_dir` and nvme tiers here"
        )
    size = max(nbytes, 1)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # If the disk filled up later, a write to the map would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                for start in range(0, size, _PIECE):
                    file.write(bytes(min(_PIECE, size - start)))
                file.flush()
            return mmap.mmap(file.fileno(), size), os.dup(file.fileno()) if keep else -1
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot reserve {size:,} bytes for the memory tier on this disk ({error.strerror}). Free some "
            "space or choose a folder on another disk; checkpoints written so far are intact"
        ) from error


class DiskFile:
    """Reserved file that is handed out in parts, from its beginning.

    The file is removed with this object, and when the process ends in any way. Its size in bytes is the sum of all
    parts rounded up to multiples of :data:`PAGE`.

    Raises:
        OutputError: The disk is full.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        self.map, self._file = map_file(folder, nbytes, keep=True)
        weakref.finalize(self, os.close, self._file)
        self.size, self.used = len(self.map), 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="disk")
        self._coherent = self._try_out()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of the next part in bytes; None if the file is full."""
        start = self.used
        if start + nbytes > self.size:
            return None
        self.used += -(-nbytes // PAGE) * PAGE
        return start

    def read_ahead(self, start: int, nbytes: int) -> None:
        """Begin to read a part into memory, piece by piece in threads."""
        if not hasattr(os, "posix_fadvise"):  # macOS reads it on the first access
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
        """Write flat memory to a part without reading whole pages first; thread-safe.

        ``start`` is an offset in bytes, the source a contiguous tensor on the host.
        """
        data = source.reshape(-1).view(torch.uint8).numpy().data
        if not self._coherent:
            self.map[start : start + len(data)] = bytes(data)
            return
        done = 0
        while done < len(data):
            done += os.pwritev(self._file, [data[done:]], start + done)

    def _try_out(self) -> bool:
        """Return True if the map and the file share data, which some network file systems do not support."""
        os.pwritev(self._file, [b"\x01"], 0)
        written = self.map[0] == 1
        self.map[0] = 0
        return written and os.preadv(self._file, [byte := bytearray(1)], 0) == 1 and byte == b"\x00"
