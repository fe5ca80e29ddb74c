"""A tensor that is made in parts, waits in the host's memory, and is read back in blocks of rows.

On CUDA the host's memory is pinned and all copies run on a stream of their own: while the part after it is
computed, a part leaves; while a block is used, the next one comes. Elsewhere the same copies are made one after the
other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

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

    Attributes:
        sent: Bytes that have left the device.
        returned: Bytes that have come back.
    """

    def __init__(self, allocate: Allocate = host_memory) -> None:
        self._allocate = allocate
        # Each with the tensor that was last handed out of it.
        self._buffers: list[tuple[Tensor, weakref.ref[Tensor]]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: set[int] = set()  # addresses
        self.sent = self.returned = 0

    @property
    def nbytes(self) -> int:
        """Bytes held in the host's memory."""
        return sum(buffer.nbytes for buffer, _ in self._buffers)

    def buffer(self, elements: int, like: Tensor) -> Tensor:
        """Flat memory of the dtype of ``like``, pinned if that is on a GPU; with any content.

        It is the caller's for as long as the caller keeps what is returned, views of it not counted.
        """
        free = [buffer for buffer, user in self._buffers if user() is None]
        enough = [b for b in free if b.dtype == like.dtype and len(b) >= elements]
        if enough:
            buffer = min(enough, key=len)
            self._buffers = [held for held in self._buffers if held[0] is not buffer]
        else:
            self._release(free)
            buffer = self._allocate(elements, like.dtype)
            if like.is_cuda and pin(buffer, like.device):
                self._pinned.add(buffer.data_ptr())
        handed_out = buffer[:elements]
        self._buffers.append((buffer, weakref.ref(handed_out)))
        return handed_out

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
        self._release([buffer for buffer, _ in self._buffers])

    def _release(self, buffers: Sequence[Tensor]) -> None:
        if self._pinned and buffers:
            torch.cuda.synchronize()
            for address in self._pinned & {buffer.data_ptr() for buffer in buffers}:
                torch.cuda.cudart().cudaHostUnregister(address)
                self._pinned.remove(address)
        gone = {id(buffer) for buffer in buffers}
        self._buffers = [held for held in self._buffers if id(held[0]) not in gone]

    def __del__(self) -> None:
        if self._pinned:
            self.free()


class OffloadedRows:
    """A tensor ``[*, N, N, c]`` without memory on the device, which is read and written on the host in blocks of rows.

    Args:
        tensor: Contiguous and alone in its memory; not to be used until :meth:`restore`.
        host: Where it waits.

    Attributes:
        placeholder: A tensor of its shape without memory or contents, to be cut into blocks in its place.
    """

    def __init__(self, tensor: Tensor, host: HostBuffers) -> None:
        self.placeholder = tensor.new_empty(()).expand(tensor.shape)
        self._tensor, self._host = tensor, host
        self._memory = host.buffer(tensor.numel(), tensor)
        self._host_copy = self._memory.view(tensor.shape)
        self._host_copy.copy_(tensor, non_blocking=True)
        host.sent += tensor.nbytes
        # Freed memory is used again by what is queued on this stream, after the copy.
        host.resize(tensor, 0)

    def rows(self, index: slice) -> Tensor:
        """Rows ``[*, rows, N, c]`` on the device."""
        found = self._host_copy[..., index, :, :]
        self._host.returned += found.nbytes
        return torch.empty(found.shape, dtype=found.dtype, device=self._tensor.device).copy_(
            found, non_blocking=True
        )

    def write(self, index: slice, rows: Tensor) -> None:
        """Let rows ``[*, rows, N, c]`` take the place of those that wait."""
        self._host_copy[..., index, :, :].copy_(rows, non_blocking=True)
        self._host.sent += rows.nbytes

    def restore(self) -> Tensor:
        """The tensor, with its memory and contents."""
        self._host.resize(self._tensor, self._tensor.nbytes)
        self._host.returned += self._tensor.nbytes
        return self._tensor.copy_(self._host_copy, non_blocking=True)


class StreamedRows:
    """A tensor ``[c, N, N]`` that is written in parts of channels and rows, and read in blocks of rows.

    Args:
        host: Where it waits.
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
        self._host, self._staging = host, staging
        sizes = [channels * (block.stop - block.start) * columns for block in blocks]
        self._memory = host.buffer(sum(sizes), like)
        self._waiting = [
            part.view(channels, -1, columns) for part in self._memory.split(sizes)
        ]  # each block without gaps
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
        target = self._waiting[block][first : first + len(part)]
        self._left[self._turn] = self._copy(target, part)
        self._host.sent += part.nbytes
        self._turn = 1 - self._turn

    def read(self, buffers: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Each block of rows and its content ``[c, rows, N]``, valid until the next one is asked for.

        Args:
            buffers: Memory on the device, each for a block.
        """
        ready = self._fetch(0, buffers)
        for index, block in enumerate(self.blocks):
            found, arrived = ready
            if index + 1 < len(self.blocks):
                ready = self._fetch(index + 1, buffers)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            yield block, found

    def _fetch(self, index: int, buffers: tuple[Tensor, Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        waiting = self._waiting[index]
        target = _shaped(buffers[index % 2], *waiting.shape)
        self._host.returned += waiting.nbytes
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
