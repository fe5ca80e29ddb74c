"""A tensor that is made in parts, waits in the host's memory or on a disk, and is read back in blocks of rows.

On CUDA the host's memory is pinned and all copies run on a stream of their own: while the part after it is
computed, a part leaves; while a block is used, the next one comes. Elsewhere the same copies are made one after the
other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fastfold.memory.devices.region import Region, smallest_gap
from fastfold.memory.devices.tiers import NvmeTier

Allocate = Callable[[int, torch.dtype], Tensor]
"""``(elements, dtype)`` to a flat tensor in the host's memory, with any content."""

_log = logging.getLogger(__name__)


def host_memory(elements: int, dtype: torch.dtype) -> Tensor:
    """Plain flat memory of any content."""
    return torch.empty(elements, dtype=dtype)


def pin(buffer: Tensor, device: torch.device) -> bool:
    """Pin memory of the host with the driver of a GPU; False, with a warning, where it cannot.

    PyTorch's allocator of pinned memory rounds sizes up to powers of two, which would nearly double a buffer of
    a hundred gibibytes; so plain memory is registered with the driver instead. Copies are right without, but wait.
    """
    if not buffer.nbytes:
        return False
    status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if status == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # with which the driver reports the same error again, to nobody
    _log.warning(
        "CUDA cannot pin %.2f GiB of the host's memory (error %d): copies to and from the GPU will be slower",
        buffer.nbytes / 2**30,
        status,
    )
    return False


class HostBuffers:
    """Buffers in the host's memory for what leaves the device for a while; kept from one use to the next.

    Args:
        allocate: Where the memory comes from.
        limit: Bytes that may be in use here at a time where ``overflow`` takes the rest; None for any number.
        overflow: Where goes what finds no room here, see :func:`disk_buffers`; None for nowhere.

    Attributes:
        sent: Bytes that have left the device to here.
        returned: Bytes that have come back from here.
        overflow: See above.
        expected: Bytes that will be in use at a time: so much is allocated when the first of them are asked for, so
            that one use leaves room for the next.
    """

    def __init__(
        self,
        allocate: Allocate = host_memory,
        *,
        limit: int | None = None,
        overflow: HostBuffers | None = None,
    ) -> None:
        self._allocate, self._limit, self.overflow = allocate, limit, overflow
        self._regions: list[Region] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: set[int] = set()  # addresses
        self._pins = True
        self.sent = self.returned = self.expected = 0

    @property
    def nbytes(self) -> int:
        """Bytes held in the host's memory."""
        return sum(region.memory.nbytes for region in self._regions)

    def buffer(self, elements: int, like: Tensor) -> Tensor:
        """Flat memory of the dtype of ``like``, pinned if that is on a GPU; with any content.

        It is the caller's for as long as the caller keeps what is returned, views of it not counted.
        """
        nbytes = elements * like.dtype.itemsize
        place = smallest_gap(self._regions, nbytes, like.dtype.itemsize)
        if place is not None:
            region, start = place
            return region.hand_out(start, elements, like.dtype)
        self._release([region for region in self._regions if not region.used()])
        region = Region(self._allocate(max(nbytes, self.expected - self.nbytes), torch.uint8))
        if self._pins and like.is_cuda and pin(region.memory, like.device):
            self._pinned.add(region.memory.data_ptr())
        self._regions.append(region)
        return region.hand_out(0, elements, like.dtype)

    def split(self, sizes: Sequence[int], like: Tensor) -> list[tuple[HostBuffers, Tensor, int]]:
        """Memory for consecutive pieces: the first of them here, those that find no room in ``overflow``.

        Args:
            sizes: Elements of each piece.
            like: See :meth:`buffer`.

        Returns:
            For here and for there, where anything is: the buffers, flat memory for the pieces, and their number.
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
        """Give a tensor's memory on the device back (0 bytes), or get it again."""
        tensor.untyped_storage().resize_(nbytes)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of all copies of a GPU; None for other devices, where a copy is done when it returns."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def free(self) -> None:
        """Give the memory back."""
        self._release(self._regions)

    def _release(self, regions: Sequence[Region]) -> None:
        if self._pinned and regions:
            for device in self._streams:
                torch.cuda.synchronize(device)
            for address in self._pinned & {region.memory.data_ptr() for region in regions}:
                torch.cuda.cudart().cudaHostUnregister(address)
                self._pinned.remove(address)
        self._regions = [region for region in self._regions if region not in regions]

    def __del__(self) -> None:
        if self._pinned:
            self.free()


def disk_buffers(folder: str | os.PathLike[str] | None = None) -> HostBuffers:
    """Buffers in files without names on a disk (:class:`~fastfold.memory.devices.tiers.NvmeTier`).

    Args:
        folder: On that disk; None for the system's folder of temporary files.
    """
    tier = NvmeTier(folder)
    found = HostBuffers(lambda elements, dtype: tier.allocate(elements, dtype, "what waits on the disk"))
    found._pins = False  # the driver pins no memory of files
    return found


def kept_rows(rows: int, kept: float) -> int:
    """How many of ``rows`` rows stay on the device where a share of them does, and no part of a row leaves."""
    return min(rows, math.ceil(rows * kept - 1e-9))


class OffloadedRows:
    """A tensor ``[*, N, N, c]`` most of whose memory on the device is free, read and written in blocks of rows.

    Its first rows may stay on the device, in memory of their own; the others wait on the host or on a disk.

    Args:
        tensor: Contiguous and alone in its memory; not to be used until :meth:`restore`.
        host: Where it waits.
        kept: Share of the rows that stay on the device, from 0 to 1.

    Attributes:
        placeholder: A tensor of its shape without memory or contents, to be cut into blocks in its place.
    """

    def __init__(self, tensor: Tensor, host: HostBuffers, *, kept: float = 0.0) -> None:
        self.placeholder = tensor.new_empty(()).expand(tensor.shape)
        self._tensor, self._host = tensor, host
        *lead, rows, columns, channels = tensor.shape
        first, each = kept_rows(rows, kept), math.prod(lead) * columns * channels
        self._memory = host.split([each] * (rows - first), tensor)  # rows are the pieces
        # What of the rows lies where; without buffers it is the device.
        self._parts: list[tuple[HostBuffers | None, slice, Tensor]] = []
        if first:
            self._parts.append((None, slice(0, first), tensor[..., :first, :, :].clone()))
        for buffers, memory, count in self._memory:
            waiting = memory.view(*lead, count, columns, channels)
            self._parts.append((buffers, slice(first, first + count), waiting))
            waiting.copy_(tensor[..., first : first + count, :, :], non_blocking=True)
            buffers.sent += waiting.nbytes
            first += count
        # Freed memory is used again by what is queued on this stream, after the copy.
        host.resize(tensor, 0)

    def _within(self, index: slice) -> Iterator[tuple[HostBuffers | None, Tensor, slice]]:
        """Parts of rows that lie together, and which of the rows ``index`` they are."""
        for buffers, rows, memory in self._parts:
            start, stop = max(index.start, rows.start), min(index.stop, rows.stop)
            if start < stop:
                found = memory[..., start - rows.start : stop - rows.start, :, :]
                yield buffers, found, slice(start - index.start, stop - index.start)

    def rows(self, index: slice) -> Tensor:
        """Rows ``[*, rows, N, c]`` on the device."""
        *lead, _, columns, channels = self._tensor.shape
        shape = (*lead, index.stop - index.start, columns, channels)
        found = torch.empty(shape, dtype=self._tensor.dtype, device=self._tensor.device)
        for buffers, memory, where in self._within(index):
            found[..., where, :, :].copy_(memory, non_blocking=True)
            if buffers is not None:
                buffers.returned += memory.nbytes
        return found

    def write(self, index: slice, rows: Tensor) -> None:
        """Let rows ``[*, rows, N, c]`` take the place of those that wait."""
        for buffers, memory, where in self._within(index):
            memory.copy_(rows[..., where, :, :], non_blocking=True)
            if buffers is not None:
                buffers.sent += memory.nbytes

    def restore(self) -> Tensor:
        """The tensor, with its memory and contents."""
        self._host.resize(self._tensor, self._tensor.nbytes)
        for buffers, rows, memory in self._parts:
            self._tensor[..., rows, :, :].copy_(memory, non_blocking=True)
            if buffers is not None:
                buffers.returned += memory.nbytes
        self._parts = []  # what had stayed has a copy now
        return self._tensor


class StreamedRows:
    """A tensor ``[c, N, N]`` that is written in parts of channels and rows, and read in blocks of rows.

    Args:
        host: Where it waits, the first blocks in memory where there is not enough for all.
        channels: c.
        blocks: The blocks of rows, in order.
        columns: N.
        staging: Two buffers on the device, each of which holds a part.
        like: Tensor of its dtype and device.
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
        # Each block without gaps, and whose memory it is.
        self._waiting: list[tuple[HostBuffers, Tensor]] = []
        for buffers, memory, count in self._memory:
            here = sizes[len(self._waiting) :][:count]
            self._waiting += [(buffers, part.view(channels, -1, columns)) for part in memory.split(here)]
        self._device = like.device
        self._stream = host.stream(like.device)
        self._left: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def part(self, channels: int, block: int) -> Tensor:
        """Where to write the next part, ``[channels, rows, N]``; to be handed to :meth:`send` when it is full."""
        event = self._left[self._turn]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        rows = self.blocks[block].stop - self.blocks[block].start
        return _shaped(self._staging[self._turn], channels, rows, self.columns)

    def send(self, part: Tensor, first: int, block: int) -> None:
        """Let the part leave for the channels from ``first`` of a block; its memory is used again later."""
        buffers, waiting = self._waiting[block]
        self._left[self._turn] = self._copy(waiting[first : first + len(part)], part)
        buffers.sent += part.nbytes
        self._turn = 1 - self._turn

    def read(self, buffers: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Each block of rows and its content ``[c, rows, N]``, valid until the next one is asked for.

        Args:
            buffers: Memory on the device, each for a block.
        """
        if not self.blocks:
            return
        ready = self._fetch(0, buffers)
        for index, block in enumerate(self.blocks):
            found, arrived = ready
            if index + 1 < len(self.blocks):
                ready = self._fetch(index + 1, buffers)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            yield block, found

    def _fetch(self, index: int, buffers: tuple[Tensor, Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        home, waiting = self._waiting[index]
        target = _shaped(buffers[index % 2], *waiting.shape)
        home.returned += waiting.nbytes
        return target, self._copy(target, waiting)

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy after everything that is queued so far; on CUDA returns the event of its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        # What wrote the source, or last read the target, is on the main stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)
