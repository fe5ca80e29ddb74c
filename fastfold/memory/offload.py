"""Tensors that are offloaded to the host's memory or a disk, and read back in blocks of rows.

On CUDA the host's memory is pinned and all copies run on a separate stream. One part is copied while the next is
computed, and one block is copied while the previous one is used. On other devices the copies run one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fastfold.memory.devices.device import copy_on
from fastfold.memory.devices.tiers import MemoryRegion, NvmeTier, smallest_gap

Allocate = Callable[[int, torch.dtype], Tensor]
"""Function from ``(elements, dtype)`` to a flat tensor in the host's memory, with any content."""

_log = logging.getLogger(__name__)


def host_memory(elements: int, dtype: torch.dtype) -> Tensor:
    """Allocate flat pageable memory with any content."""
    return torch.empty(elements, dtype=dtype)


def pin(buffer: Tensor, device: torch.device) -> bool:
    """Pin host memory with the driver of a GPU; return False and log a warning if that fails."""
    # PyTorch's allocator of pinned memory rounds sizes up to powers of two, up to twice the size. Therefore pageable
    # memory is registered with the driver. Without pinning, copies are correct but synchronous.
    if not buffer.nbytes:
        return False
    status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if status == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # clears the error, which the driver would report again
    _log.warning(
        "CUDA cannot pin %.2f GiB of the host's memory (error %d): copies to and from the GPU will be slower",
        buffer.nbytes / 2**30,
        status,
    )
    return False


class HostBuffers:
    """Reusable buffers in the host's memory for offloaded tensors.

    Args:
        allocate: Allocates the memory.
        limit: Largest number of bytes in use at a time, if ``overflow`` is given; None for no limit.
        overflow: Buffers for tensors over the limit, see :func:`disk_buffers`; None for none.

    Attributes:
        sent: Bytes copied from the device.
        returned: Bytes copied to the device.
        overflow: See above.
        expected: Bytes that will be in use at a time. The first request allocates this size, so that a tensor leaves
            room for the next.

    Example:
        >>> import torch
        >>> from fastfold.memory import HostBuffers
        >>> buffers, x = HostBuffers(), torch.randn(1000)
        >>> copy = buffers.buffer(x.numel(), like=x).copy_(x)
        >>> del copy  # its memory is used again
        >>> other = buffers.buffer(500, like=x)
        >>> buffers.nbytes
        4000
    """

    def __init__(
        self,
        allocate: Allocate = host_memory,
        *,
        limit: int | None = None,
        overflow: HostBuffers | None = None,
    ) -> None:
        self._allocate, self._limit, self.overflow = allocate, limit, overflow
        self._regions: list[MemoryRegion] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[
            int, torch.device
        ] = {}  # device that copies from and to it, by the address of pinned memory
        self._pins = True
        self.sent = self.returned = self.expected = 0

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes."""
        return sum(region.memory.nbytes for region in self._regions)

    def buffer(self, elements: int, like: Tensor) -> Tensor:
        """Return flat memory of the dtype of ``like``, pinned if ``like`` is on a GPU; with any content.

        The memory is in use while the caller keeps the returned tensor, regardless of its views.
        """
        nbytes = elements * like.dtype.itemsize
        place = smallest_gap(self._regions, nbytes, like.dtype.itemsize)
        if place is not None:
            region, start = place
            return region.hand_out(start, elements, like.dtype)
        self._release([region for region in self._regions if not region.used()])
        region = MemoryRegion(self._allocate(max(nbytes, self.expected - self.nbytes), torch.uint8))
        if self._pins and like.is_cuda and pin(region.memory, like.device):
            self._pinned[region.memory.data_ptr()] = like.device
        self._regions.append(region)
        return region.hand_out(0, elements, like.dtype)

    def split(self, sizes: Sequence[int], like: Tensor) -> list[tuple[HostBuffers, Tensor, int]]:
        """Allocate memory for consecutive pieces, first here, then in ``overflow``.

        Sizes are numbers of elements; ``like`` is that of :meth:`buffer`.

        Returns:
            For these buffers and the overflow, if used: the buffers, flat memory for the pieces, and their number.
        """
        here = len(sizes)
        if self.overflow is not None and self._limit is not None:
            used = sum(stop - start for region in self._regions for start, stop in region.used())
            room, here = (self._limit - used) // like.dtype.itemsize, 0
            while here < len(sizes) and sizes[here] <= room:
                room -= sizes[here]
                here += 1
        parts = ((self, sizes[:here], here), (self.overflow, sizes[here:], len(sizes) - here))
        return [
            (buffers, buffers.buffer(sum(own), like), count)
            for buffers, own, count in parts
            if buffers and count
        ]

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """Free a tensor's memory on the device (0 bytes), or allocate it again."""
        tensor.untyped_storage().resize_(nbytes)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the copy stream of a GPU; None for other devices, whose copies are synchronous."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def free(self) -> None:
        """Free the memory."""
        self._release(self._regions)

    def _release(self, regions: Sequence[MemoryRegion]) -> None:
        pinned = [address for region in regions if (address := region.memory.data_ptr()) in self._pinned]
        for device in {self._pinned[address] for address in pinned}:
            torch.cuda.synchronize(device)  # copies may still be queued on any of its streams
        for address in pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
            del self._pinned[address]
        self._regions = [region for region in self._regions if region not in regions]

    def __del__(self) -> None:
        if self._pinned:
            self.free()


def disk_buffers(folder: str | os.PathLike[str] | None = None) -> HostBuffers:
    """Return buffers in anonymous files on a disk, by default in the system's folder of temporary files.

    Example:
        >>> import torch
        >>> from fastfold.memory import disk_buffers
        >>> buffers, x = disk_buffers("."), torch.randn(1000)
        >>> copy = buffers.buffer(x.numel(), like=x).copy_(x)
        >>> torch.equal(copy, x), buffers.nbytes
        (True, 4000)
    """
    tier = NvmeTier(folder)
    buffers = HostBuffers(lambda elements, dtype: tier.allocate(elements, dtype, "an offloaded tensor"))
    buffers._pins = False  # the driver cannot pin mapped files
    return buffers


def kept_rows(rows: int, kept: float) -> int:
    """Return the number of rows that stay on the device for a share of ``rows``."""
    return min(rows, math.ceil(rows * kept - 1e-9))


class OffloadedRows:
    """Offloaded tensor ``[*, N, N, c]``, read and written in blocks of rows.

    A share of the rows can stay on the device, in separate memory.

    Args:
        tensor: Contiguous tensor that shares its memory with no other; not to be used until :meth:`restore`.
        host: Buffers for the offloaded rows.
        kept: Share of the rows that stays on the device, from 0 to 1.

    Attributes:
        placeholder: Tensor of the same shape without memory, to be cut into blocks.
    """

    def __init__(self, tensor: Tensor, host: HostBuffers, *, kept: float = 0.0) -> None:
        self.placeholder = tensor.new_empty(()).expand(tensor.shape)
        self._tensor, self._host = tensor, host
        *lead, rows, columns, channels = tensor.shape
        first, each = kept_rows(rows, kept), math.prod(lead) * columns * channels
        self._memory = host.split([each] * (rows - first), tensor)  # each row is a piece
        # Place and range of the rows; without buffers they are on the device.
        self._parts: list[tuple[HostBuffers | None, slice, Tensor]] = []
        if first:
            self._parts.append((None, slice(0, first), tensor[..., :first, :, :].clone()))
        for buffers, memory, count in self._memory:
            waiting = memory.view(*lead, count, columns, channels)
            self._parts.append((buffers, slice(first, first + count), waiting))
            waiting.copy_(tensor[..., first : first + count, :, :], non_blocking=True)
            buffers.sent += waiting.nbytes
            first += count
        # Operators queued later on this stream reuse the freed memory, after the copy.
        host.resize(tensor, 0)

    def _within(self, index: slice) -> Iterator[tuple[HostBuffers | None, Tensor, slice]]:
        """Yield the contiguous parts of ``index``, with their buffers."""
        for buffers, rows, memory in self._parts:
            start, stop = max(index.start, rows.start), min(index.stop, rows.stop)
            if start < stop:
                part = memory[..., start - rows.start : stop - rows.start, :, :]
                yield buffers, part, slice(start - index.start, stop - index.start)

    def rows(self, index: slice) -> Tensor:
        """Return rows ``[*, rows, N, c]`` on the device."""
        *lead, _, columns, channels = self._tensor.shape
        shape = (*lead, index.stop - index.start, columns, channels)
        whole = torch.empty(shape, dtype=self._tensor.dtype, device=self._tensor.device)
        for buffers, memory, where in self._within(index):
            whole[..., where, :, :].copy_(memory, non_blocking=True)
            if buffers is not None:
                buffers.returned += memory.nbytes
        return whole

    def write(self, index: slice, rows: Tensor) -> None:
        """Overwrite offloaded rows with ``[*, rows, N, c]``."""
        for buffers, memory, where in self._within(index):
            memory.copy_(rows[..., where, :, :], non_blocking=True)
            if buffers is not None:
                buffers.sent += memory.nbytes

    def restore(self) -> Tensor:
        """Return the tensor with its memory and contents."""
        self._host.resize(self._tensor, self._tensor.nbytes)
        for buffers, rows, memory in self._parts:
            self._tensor[..., rows, :, :].copy_(memory, non_blocking=True)
            if buffers is not None:
                buffers.returned += memory.nbytes
        self._parts = []  # the kept rows are copied
        return self._tensor


class StreamedRows:
    """Tensor ``[c, N, N]``, written in parts of channels and rows and read in blocks of rows.

    ``staging`` is two buffers on the device for one part each, and ``like`` a tensor of the same dtype and device.
    ``blocks`` are in order.
    """

    def __init__(
        self,
        host: HostBuffers,
        channels: int,
        blocks: Sequence[slice],
        columns: int,
        staging: tuple[Tensor, Tensor],
        like: Tensor,
    ) -> None:
        self.channels, self.blocks, self.columns = channels, blocks, columns
        self._staging = staging
        sizes = [channels * (block.stop - block.start) * columns for block in blocks]
        self._memory = host.split(sizes, like)
        # Contiguous memory of each block, with its buffers.
        self._waiting: list[tuple[HostBuffers, Tensor]] = []
        for buffers, memory, count in self._memory:
            here = sizes[len(self._waiting) :][:count]
            self._waiting += [(buffers, part.view(channels, -1, columns)) for part in memory.split(here)]
        self._device = like.device
        self._stream = host.stream(like.device)
        self._left: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def part(self, channels: int, block: int) -> Tensor:
        """Return a buffer for the next part, ``[channels, rows, N]``; pass it to :meth:`send` when it is full."""
        event = self._left[self._turn]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        rows = self.blocks[block].stop - self.blocks[block].start
        return _shaped(self._staging[self._turn], channels, rows, self.columns)

    def send(self, part: Tensor, first: int, block: int) -> None:
        """Copy the part to the channels from ``first`` of a block; its buffer is reused later."""
        buffers, waiting = self._waiting[block]
        self._left[self._turn] = self._copy(waiting[first : first + len(part)], part)
        buffers.sent += part.nbytes
        self._turn = 1 - self._turn

    def read(self, buffers: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yield each block of rows with its content ``[c, rows, N]``, valid until the next; a buffer is for a block."""
        if not self.blocks:
            return
        ready = self._fetch(0, buffers)
        for index, block in enumerate(self.blocks):
            content, arrived = ready
            if index + 1 < len(self.blocks):
                ready = self._fetch(index + 1, buffers)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            yield block, content

    def _fetch(self, index: int, buffers: tuple[Tensor, Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        home, waiting = self._waiting[index]
        target = _shaped(buffers[index % 2], *waiting.shape)
        home.returned += waiting.nbytes
        return target, self._copy(target, waiting)

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy after the queued work; on CUDA return the event at the end."""
        if self._stream is None:
            target.copy_(source)
            return None
        # The writer of the source and the last reader of the target are on the main stream.
        return copy_on(self._stream, target, source)


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)
