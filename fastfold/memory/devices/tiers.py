"""Where bytes live other than on the device: the host's memory, and memory-mapped files, behind one interface."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import torch
from torch import Tensor

from fastfold.errors import OutputError

# Tensors begin on multiples of this: kernels may round differently on unaligned data.
ALIGNMENT = 64


class Tier:
    """A place for flat buffers. This one is the host's memory.

    Args:
        pinned: Whether memory is pinned, so that a GPU copies from it while it works.

    Attributes:
        used: Bytes of chunks that live here now.
        peak: Most bytes that ever did.
    """

    name = "host"

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.used = self.peak = 0

    def allocate(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """A flat buffer of zeros, counted until the tensor's memory goes.

        Args:
            numel: Elements.
            dtype: Their type.
            what: Named in errors.
        """
        self._charge(numel * dtype.itemsize, what)
        buffer = self._make(numel, dtype)
        weakref.finalize(buffer.untyped_storage(), self._discharge, numel * dtype.itemsize)
        return buffer

    def allocate_kept(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """As :meth:`allocate`, for what is here as long as the tier: it has the room that :meth:`preallocate` made."""
        return self.allocate(numel, dtype, what)

    def preallocate(self, nbytes: int) -> None:
        """Make room for what :meth:`allocate_kept` will be asked for, where that may fail later."""

    def announce(self, buffer: Tensor) -> None:
        """A buffer from here will soon be read: begin to bring it into memory, where that takes time."""

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=self.pinned)

    def _charge(self, size: int, what: str) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def _discharge(self, size: int) -> None:
        self.used -= size


class NvmeTier(Tier):
    """Memory-mapped files; they have no names, so that nothing stays behind when the process is killed.

    Args:
        folder: A folder on the disk to be used; None for the system's folder of temporary files.
    """

    name = "nvme"

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
        self._room: mmap.mmap | None = None
        self._taken = 0
        self._places: dict[int, tuple[mmap.mmap, int]] = {}

    def preallocate(self, nbytes: int) -> None:
        """Reserve one file for all that :meth:`allocate_kept` will be asked for.

        Args:
            nbytes: Bytes of that, each allocation rounded up to a multiple of :data:`ALIGNMENT`.

        Raises:
            OutputError: The disk has no room.
        """
        self._room, self._taken = self._map(nbytes), 0

    def allocate_kept(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """The next part of the reserved file, of zeros; a file of its own where that has no room left."""
        size = numel * dtype.itemsize
        if self._room is None or self._taken + size > len(self._room) or not numel:
            return self.allocate(numel, dtype, what)
        start, self._taken = self._taken, self._taken + -(-size // ALIGNMENT) * ALIGNMENT
        self._charge(size, what)
        buffer = self._view(self._room, start, numel, dtype)
        weakref.finalize(buffer.untyped_storage(), self._discharge, size)
        return buffer

    def announce(self, buffer: Tensor) -> None:
        """The kernel reads it from the disk while the process goes on."""
        room, start = self._places[buffer.untyped_storage()._cdata]
        first = start - start % mmap.PAGESIZE
        room.madvise(mmap.MADV_WILLNEED, first, start + buffer.nbytes - first)

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._view(self._map(numel * dtype.itemsize), 0, numel, dtype)

    def _view(self, room: mmap.mmap, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.frombuffer(room, dtype=dtype, count=numel, offset=start)
        storage = buffer.untyped_storage()
        self._places[storage._cdata] = (room, start)
        weakref.finalize(storage, self._places.pop, storage._cdata)
        return buffer

    def _map(self, nbytes: int) -> mmap.mmap:
        """A file of zeros without a name, in memory."""
        size = max(nbytes, 1)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # Blocks are reserved now: a disk that fills up later would kill the process on a write to the map.
                os.posix_fallocate(file.fileno(), 0, size)
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: no {size:,} bytes for the memory tier on this disk ({error.strerror}). Free some "
                "space or choose a folder on another disk; checkpoints written so far are intact"
            ) from error
