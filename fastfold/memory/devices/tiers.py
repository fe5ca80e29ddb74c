"""Where bytes live other than on the device: the host's memory, and memory-mapped files, behind one interface."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from fastfold.memory.devices.disk_file import DiskFile, map_file
from fastfold.memory.devices.region import Region, smallest_gap

# Tensors begin on multiples of this: kernels may round differently on unaligned data.
ALIGNMENT = 64

# Bytes of a file for what waits on a disk, unless one tensor takes more.
_WAITING_FILE = 1 << 26


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
        return self._counted(lambda: self._make(numel, dtype), numel * dtype.itemsize, what)

    def allocate_kept(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """As :meth:`allocate`, for what is here as long as the tier: it has the room that :meth:`preallocate` made."""
        return self.allocate(numel, dtype, what)

    def allocate_waiting(self, numel: int, dtype: torch.dtype, what: str = "a tensor") -> Tensor:
        """As :meth:`allocate`, but of any content, for what waits here and is asked for again in every step.

        Its room is free again when the tensor that is returned goes, views of it not counted.
        """
        # Filling pinned memory with zeros would take as long as the copy that follows.
        return self._counted(
            lambda: torch.empty(numel, dtype=dtype, pin_memory=self.pinned), numel * dtype.itemsize, what
        )

    def preallocate(self, nbytes: int) -> None:
        """Make room for what :meth:`allocate_kept` will be asked for, where that may fail later."""

    def announce(self, buffer: Tensor) -> None:
        """A buffer from here will soon be read: begin to bring it into memory, where that takes time."""

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor of the host to a part of a buffer from here, of its shape."""
        target.copy_(source)

    def in_thread(self, task: Callable[[], None]) -> Future[None] | None:
        """Run a function that writes here in a thread, where that takes time; None where it does not."""
        return None

    def _counted(self, make: Callable[[], Tensor], size: int, what: str) -> Tensor:
        """Return a new buffer of some bytes, counted before it is made."""
        self._charge(size, what)
        buffer = make()
        weakref.finalize(buffer.untyped_storage(), self._discharge, size)
        return buffer

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
        self._file: DiskFile | None = None
        self._places: dict[int, int] = {}
        self._waiting: list[Region] = []

    def preallocate(self, nbytes: int) -> None:
        """Reserve one file for all that :meth:`allocate_kept` will be asked for.

        Args:
            nbytes: Bytes of that, each allocation rounded up to a multiple of
                :data:`~fastfold.memory.devices.disk_file.PAGE`.

        Raises:
            OutputError: The disk has no room.
        """
        self._file = DiskFile(self.folder, nbytes)

    def allocate_kept(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """The next part of the reserved file, of zeros; a file of its own where that has no room left."""
        size = numel * dtype.itemsize
        start = self._file.take(size) if self._file is not None and numel else None
        if self._file is None or start is None:
            return self.allocate(numel, dtype, what)
        self._charge(size, what)
        buffer = torch.frombuffer(self._file.map, dtype=dtype, count=numel, offset=start)
        storage = buffer.untyped_storage()
        self._places[storage._cdata] = start
        weakref.finalize(storage, self._places.pop, storage._cdata)
        weakref.finalize(storage, self._discharge, size)
        return buffer

    def allocate_waiting(self, numel: int, dtype: torch.dtype, what: str = "a tensor") -> Tensor:
        """A part of a file that is kept for the next step, which needs no new room on the disk then."""
        size = numel * dtype.itemsize
        place = smallest_gap(self._waiting, size, ALIGNMENT)
        if place is None:
            self._waiting = [region for region in self._waiting if region.used()]
            file = map_file(self.folder, max(size, _WAITING_FILE))[0]
            place = Region(torch.frombuffer(file, dtype=torch.uint8)), 0
            self._waiting.append(place[0])
        region, start = place
        self._charge(size, what)
        part = region.hand_out(start, numel, dtype)
        weakref.finalize(part, self._discharge, size)
        return part

    def announce(self, buffer: Tensor) -> None:
        """Threads have it read from the disk while the process goes on, if it lies in the reserved file."""
        start = self._places.get(buffer.untyped_storage()._cdata)
        if self._file is not None and start is not None:
            self._file.read_ahead(start, buffer.nbytes)

    def write(self, target: Tensor, source: Tensor) -> None:
        """Past the map where that is possible: a write to a page that is not in memory would read it first."""
        start = self._places.get(target.untyped_storage()._cdata)
        same = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if self._file is None or start is None or not same or source.device.type != "cpu":
            super().write(target, source)
        else:
            self._file.write(start + int(target.storage_offset()) * target.itemsize, source)

    def in_thread(self, task: Callable[[], None]) -> Future[None] | None:
        """Run it in a thread of the reserved file, if there is one."""
        return None if self._file is None else self._file.in_thread(task)

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(map_file(self.folder, numel * dtype.itemsize)[0], dtype=dtype, count=numel)
