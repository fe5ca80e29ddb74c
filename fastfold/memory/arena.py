"""Where bytes live: the device, the host, and memory-mapped files, behind one interface.

The simulated device is a CPU that behaves like a small accelerator: it has a hard budget, it counts every tensor that
an operator makes, and what has left it reads as NaN. Placement policies are tested on it without a GPU; what they
would move over PCIe is counted, what it would cost in time is not.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastfold.errors import OutputError

# Tensors begin on multiples of this: kernels may round differently on unaligned data.
ALIGNMENT = 64


class DeviceFull(RuntimeError):
    """An allocation that the device's budget has no room for.

    Args:
        wanted: Bytes of the allocation.
        used: Bytes in use.
        budget: Bytes that the device has.
        what: What it was for.
    """

    def __init__(self, wanted: int, used: int, budget: int, what: str) -> None:
        super().__init__(f"{what}: {wanted:,} bytes do not fit, {used:,} of {budget:,} are in use")
        self.wanted, self.used, self.budget = wanted, used, budget


class Tier:
    """A place for flat buffers. This one is the host's memory.

    Args:
        pinned: Page-locked, so that a GPU copies from it beside its work.

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

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        size = max(numel * dtype.itemsize, 1)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # Blocks are reserved now: a disk that fills up later would kill the process on a write to the map.
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: no {size:,} bytes for the memory tier on this disk ({error.strerror}). Free some "
                "space or choose a folder on another disk; checkpoints written so far are intact"
            ) from error
        return torch.frombuffer(mapped, dtype=dtype, count=numel)


class Device(Tier):
    """What computes, with a budget. Chunks come and go; tensors made by operators are the rest.

    Args:
        budget: Bytes.
        device: Where tensors are made.

    Attributes:
        received: Bytes that chunks brought from other tiers.
    """

    name = "device"

    def __init__(self, budget: int, device: torch.device) -> None:
        super().__init__()
        self.budget, self.device = budget, device
        self.received = 0
        self._buffers: set[int] = set()

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of a chunk's buffer here."""
        return tensor.untyped_storage()._cdata in self._buffers

    def _own(self, buffer: Tensor) -> Tensor:
        """Notes a chunk's buffer for :meth:`owns`, as long as it lives."""
        storage = buffer.untyped_storage()
        self._buffers.add(storage._cdata)
        weakref.finalize(storage, self._buffers.discard, storage._cdata)
        return buffer

    def allocate(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """A buffer that stays on the device."""
        return self._own(super().allocate(numel, dtype, what))

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer without memory yet; views of it stay valid through :meth:`fill` and :meth:`drop`."""
        raise NotImplementedError

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Gives a reserved buffer memory and the contents of ``source``."""
        raise NotImplementedError

    def wait(self, buffer: Tensor) -> None:
        """Operators after this find what :meth:`fill` brings."""

    def drop(self, buffer: Tensor) -> None:
        """Takes a buffer's memory away again."""
        raise NotImplementedError

    def elsewhere(self) -> int:
        """Bytes of things other than chunks now."""
        raise NotImplementedError

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor that stays on the device, where that does not happen by itself."""

    def mark(self) -> int:
        """Most bytes of things other than chunks since the last call."""
        raise NotImplementedError

    @contextmanager
    def host_work(self) -> Iterator[None]:
        """What happens inside is not the device's work."""
        yield


class SimulatedDevice(Device):
    """A CPU with the manners of a small accelerator.

    Inside :meth:`running` every tensor that an operator makes takes room until its memory goes; what would exceed the
    budget raises :class:`DeviceFull`. Workspaces inside a kernel are not seen. A dropped buffer is filled with NaN, so
    that an access that was not announced shows in the loss.

    Args:
        budget: Bytes.
    """

    def __init__(self, budget: int) -> None:
        super().__init__(budget, torch.device("cpu"))
        self.other = self._highest = 0
        self._known: set[int] = set()
        self._paused = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operators inside run on this device."""
        with _Meter(self):
            yield

    @contextmanager
    def host_work(self) -> Iterator[None]:
        """Operators inside run on the host after all."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of NaN (zeros for integers) that counts nothing yet."""
        buffer = self._own(torch.zeros(numel, dtype=dtype))
        _poison(buffer)
        return buffer

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Counts the buffer and copies."""
        self._charge(buffer.nbytes, "a chunk of parameters")
        buffer.copy_(source)
        self.received += buffer.nbytes

    def drop(self, buffer: Tensor) -> None:
        """Poisons the buffer and stops counting it."""
        _poison(buffer)
        self._discharge(buffer.nbytes)

    def elsewhere(self) -> int:
        """Bytes of operators' tensors now."""
        return self.other

    def mark(self) -> int:
        """Most bytes made by operators since the last call."""
        highest, self._highest = self._highest, self.other
        return highest

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor that an operator has made or that came with the batch, until its memory goes."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if self._paused or key in self._known or key in self._buffers:
            return
        self._charge(size, "a tensor made by an operator")
        self._known.add(key)
        self.other += size
        self._highest = max(self._highest, self.other)
        weakref.finalize(storage, self._gone, key, size)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Notes that a tensor's memory is the host's, so that views made of it later are not counted."""
        storage = tensor.untyped_storage()
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._known.discard, storage._cdata)
        return tensor

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.other -= size
        self._discharge(size)

    def _charge(self, size: int, what: str) -> None:
        if self.used + size > self.budget:
            raise DeviceFull(size, self.used, self.budget, what)
        super()._charge(size, what)


class CudaDevice(Device):
    """A GPU. Evicted buffers give their memory back to PyTorch's allocator; views of them come alive on a reload.

    Args:
        budget: Bytes that chunks and activations may take together.
        device: For example ``cuda:0``.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        super().__init__(budget, device)
        self._stream = torch.cuda.Stream(device)
        self._arriving: dict[int, torch.cuda.Event] = {}

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer whose storage is empty."""
        buffer = self._own(torch.empty(numel, dtype=dtype, device=self.device))
        buffer.untyped_storage().resize_(0)
        return buffer

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Copies on a side stream; :meth:`wait` joins it."""
        self._charge(buffer.nbytes, "a chunk of parameters")
        buffer.untyped_storage().resize_(buffer.nbytes)
        # The memory may have been freed by work that the main stream has not finished.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._arriving[buffer.untyped_storage()._cdata] = event
        self.received += buffer.nbytes

    def wait(self, buffer: Tensor) -> None:
        """Operators queued after this find the buffer's contents."""
        event = self._arriving.pop(buffer.untyped_storage()._cdata, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def drop(self, buffer: Tensor) -> None:
        """Frees the storage, after a copy that is still under way."""
        self.wait(buffer)
        buffer.untyped_storage().resize_(0)
        self._discharge(buffer.nbytes)

    def elsewhere(self) -> int:
        """What PyTorch has allocated, without chunks."""
        return max(0, torch.cuda.memory_allocated(self.device) - self.used)

    def mark(self) -> int:
        """PyTorch's peak since the last call without the chunks that are here now."""
        peak = torch.cuda.max_memory_allocated(self.device) - self.used
        torch.cuda.reset_peak_memory_stats(self.device)
        return max(0, peak)


class _Meter(TorchDispatchMode):
    """Shows a simulated device every tensor that operators make."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._simulated = device

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._simulated.hold(leaf)
        return out


def _poison(buffer: Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
