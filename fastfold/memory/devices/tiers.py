"""Memory tiers other than the device: the host's memory, and memory-mapped files."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fastfold.memory.devices.disk_file import DiskFile, map_file

# Alignment of tensors in bytes: kernels may round differently on unaligned data.
ALIGNMENT = 64

# Size in bytes of a file for offloaded tensors, unless one tensor is larger.
_WAITING_FILE = 1 << 26


class Tier:
    """Tier of memory with flat buffers; this class uses the host's memory.

    Copies from pinned memory to a GPU are asynchronous. ``used`` is bytes of chunks, and ``peak`` its largest value.

    Example:
        >>> import torch
        >>> from fastfold.memory import Tier
        >>> host = Tier()
        >>> buffer = host.allocate(1000, torch.float32)
        >>> host.used
        4000
        >>> del buffer
        >>> host.used, host.peak
        (0, 4000)
    """

    name = "host"

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.used = self.peak = 0

    def allocate(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """Allocate a flat buffer of zeros, counted until its memory is freed; errors name ``what`` it is for."""
        return self._counted(lambda: self._make(numel, dtype), numel * dtype.itemsize, what)

    def allocate_kept(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """Allocate a buffer for the lifetime of the tier, from the space of :meth:`preallocate`."""
        return self.allocate(numel, dtype, what)

    def allocate_waiting(self, numel: int, dtype: torch.dtype, what: str = "a tensor") -> Tensor:
        """Allocate a buffer of any content for tensors that are offloaded in every step.

        Its space is free again when the returned tensor is deleted, even if views of it exist.
        """
        # Filling pinned memory with zeros would take as long as the copy.
        return self._counted(
            lambda: torch.empty(numel, dtype=dtype, pin_memory=self.pinned), numel * dtype.itemsize, what
        )

    def preallocate(self, nbytes: int) -> None:
        """Reserve space for :meth:`allocate_kept`, on tiers where a later allocation may fail."""

    def announce(self, buffer: Tensor) -> None:
        """Begin to read a buffer into memory, on tiers where that takes time."""

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copy a host tensor to a part of a buffer of this tier, of the same shape."""
        target.copy_(source)

    def in_thread(self, task: Callable[[], None]) -> Future[None] | None:
        """Run a function that writes to this tier in a thread; return None without a thread."""
        return None

    def _counted(self, make: Callable[[], Tensor], size: int, what: str) -> Tensor:
        """Return a new buffer, counted before it is allocated."""
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


class MemoryRegion:
    """Block of host memory, a flat tensor of bytes, whose parts are used independently."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        # First and last byte of each part, with a reference to its tensor.
        self._parts: list[tuple[int, int, TensorWeakRef]] = []

    def used(self) -> list[tuple[int, int]]:
        """Return the parts that are in use, in order."""
        self._parts = [part for part in self._parts if part[2]() is not None]
        return sorted((start, stop) for start, stop, _ in self._parts)

    def gap(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        """Return size and start of the smallest sufficient free part; None if there is none."""
        gaps, free = [], 0
        for start, stop in [*self.used(), (self.memory.nbytes, self.memory.nbytes)]:
            if start - free >= nbytes:
                gaps.append((start - free, free))
            free = -(-stop // alignment) * alignment
        return min(gaps, default=None)

    def hand_out(self, start: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return flat memory from byte ``start`` on, in use while the returned tensor lives."""
        stop = start + elements * dtype.itemsize
        part = self.memory[start:stop].view(dtype)
        self._parts.append((start, stop, TensorWeakRef(part)))
        return part


def smallest_gap(
    regions: Iterable[MemoryRegion], nbytes: int, alignment: int
) -> tuple[MemoryRegion, int] | None:
    """Return region and start of the smallest sufficient free part; None if there is none."""
    gaps = [(gap, region) for region in regions if (gap := region.gap(nbytes, alignment)) is not None]
    if not gaps:
        return None
    (_, start), region = min(gaps, key=lambda gap: gap[0])
    return region, start


class NvmeTier(Tier):
    """Anonymous mapped files, removed even if the process is killed; by default in the system's temporary folder.

    Example:
        >>> import os
        >>> import torch
        >>> from fastfold.memory import NvmeTier
        >>> disk, before = NvmeTier("."), os.listdir(".")
        >>> buffer = disk.allocate(1000, torch.float32).fill_(2)
        >>> float(buffer.sum()), disk.used, os.listdir(".") == before  # the file has no name
        (2000.0, 4000, True)
    """

    name = "nvme"

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
        self._file: DiskFile | None = None
        self._places: dict[int, int] = {}
        self._waiting: list[MemoryRegion] = []

    def preallocate(self, nbytes: int) -> None:
        """Reserve one file for the buffers of :meth:`allocate_kept`.

        ``nbytes`` is the sum of their sizes, each rounded up to a multiple of
        :data:`~fastfold.memory.devices.disk_file.PAGE`.

        Raises:
            OutputError: The disk is full.
        """
        self._file = DiskFile(self.folder, nbytes)

    def allocate_kept(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """Return the next part of the reserved file, or of a separate file when it is full; zeros."""
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
        """Return a part of a file that is reused in every step."""
        size = numel * dtype.itemsize
        place = smallest_gap(self._waiting, size, ALIGNMENT)
        if place is None:
            self._waiting = [region for region in self._waiting if region.used()]
            file = map_file(self.folder, max(size, _WAITING_FILE))[0]
            place = MemoryRegion(torch.frombuffer(file, dtype=torch.uint8)), 0
            self._waiting.append(place[0])
        region, start = place
        self._charge(size, what)
        part = region.hand_out(start, numel, dtype)
        weakref.finalize(part, self._discharge, size)
        return part

    def announce(self, buffer: Tensor) -> None:
        """Read a part of the reserved file from the disk, in threads."""
        start = self._places.get(buffer.untyped_storage()._cdata)
        if self._file is not None and start is not None:
            self._file.read_ahead(start, buffer.nbytes)

    def write(self, target: Tensor, source: Tensor) -> None:
        """Write to the file instead of the map where possible, because the map would read each page first."""
        start = self._places.get(target.untyped_storage()._cdata)
        same = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if self._file is None or start is None or not same or source.device.type != "cpu":
            super().write(target, source)
        else:
            self._file.write(start + int(target.storage_offset()) * target.itemsize, source)

    def in_thread(self, task: Callable[[], None]) -> Future[None] | None:
        """Run a function in a thread of the reserved file; return None without a file."""
        return None if self._file is None else self._file.in_thread(task)

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(map_file(self.folder, numel * dtype.itemsize)[0], dtype=dtype, count=numel)
