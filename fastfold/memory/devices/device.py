"""Devices with a memory budget: the interface, and CUDA."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.memory.devices.tiers import Tier
from fastfold.memory.planner.schedule import BudgetError

# Bytes that may be in staging buffers at a time.
_WAITING = 1 << 28


class Fetches:
    """Queue of copies that start and finish in the same order.

    A copy that is added to its target, or whose target is not pinned, goes through a staging buffer. When the staging
    buffers exceed their limit, the oldest copy is finished.
    """

    def __init__(self) -> None:
        # Function that waits until a copy is in its target, and bytes of its staging buffer.
        self._queue: deque[tuple[Callable[[], object], int]] = deque()
        self._waiting = 0

    def put(
        self,
        target: Tensor,
        *,
        staged: Tensor | None = None,
        add: bool,
        event: torch.cuda.Event | None,
        to: Tier,
    ) -> None:
        """Add a queued copy.

        A copy without ``staged`` goes to ``target`` directly; one without ``event`` has ended.
        """

        def write() -> None:
            if event is not None:
                event.synchronize()
            if staged is not None:
                with torch.no_grad():
                    if add:
                        target.add_(staged)
                    else:
                        to.write(target, staged)

        # A sum must wait until its target is written.
        future = None if add or staged is None else to.in_thread(write)
        size = 0 if staged is None else staged.nbytes
        self._queue.append((write if future is None else future.result, size))
        self._waiting += size
        while self._waiting > _WAITING and len(self._queue) > 1:
            self._finish()

    def finish(self) -> None:
        """Finish all copies."""
        while self._queue:
            self._finish()

    def _finish(self) -> None:
        wait, size = self._queue.popleft()
        self._waiting -= size
        wait()


class DeviceFull(RuntimeError):
    """Allocation that exceeds the device's budget.

    Sizes are in bytes; ``what`` is the name of the allocation in the message.

    Example:
        >>> import torch
        >>> from fastfold.memory import DeviceFull, SimulatedDevice
        >>> try:
        ...     with SimulatedDevice(budget=1000).running():
        ...         torch.zeros(500)
        ... except DeviceFull as error:
        ...     print(error)
        a tensor made by an operator: 2,000 bytes do not fit, 0 of 1,000 are in use
    """

    def __init__(self, wanted: int, used: int, budget: int, what: str) -> None:
        super().__init__(f"{what}: {wanted:,} bytes do not fit, {used:,} of {budget:,} are in use")
        self.wanted, self.used, self.budget = wanted, used, budget


@dataclass(eq=False)
class EarlyCopy:
    """Tensor that is being copied to a device before it is used."""

    tensor: Tensor | None  #: None after it was taken or cancelled
    event: torch.cuda.Event | None = None  #: On a GPU, the end of the copy


class Device(Tier):
    """Device with a budget, which chunks share with the tensors made by operators.

    ``received`` is bytes of chunks copied from other tiers.

    Example:
        >>> import torch
        >>> from fastfold.memory import GeminiConfig
        >>> device = GeminiConfig(budget="1MiB", device="cpu").open_device()
        >>> chunk = device.reserve(1000, torch.float32)
        >>> device.fill(chunk, torch.ones(1000))
        >>> float(chunk.sum()), device.used
        (1000.0, 4000)
        >>> device.drop(chunk)
        >>> device.used, device.received
        (0, 4000)
    """

    name = "device"

    def __init__(self, budget: int, device: torch.device) -> None:
        super().__init__()
        self.budget, self.device = budget, device
        self.received = 0
        self._buffers: set[int] = set()
        self._early_copies: list[EarlyCopy] = []
        self._fetches = Fetches()

    def owns(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a part of a chunk's buffer on this device."""
        return tensor.untyped_storage()._cdata in self._buffers

    def _own(self, buffer: Tensor) -> Tensor:
        """Register a chunk's buffer for :meth:`owns` for its lifetime."""
        storage = buffer.untyped_storage()
        self._buffers.add(storage._cdata)
        weakref.finalize(storage, self._buffers.discard, storage._cdata)
        return buffer

    def allocate(self, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        """Allocate a buffer that stays on the device."""
        return self._own(super().allocate(numel, dtype, what))

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer without memory; its views stay valid through :meth:`fill` and :meth:`drop`."""
        raise NotImplementedError

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Allocate the memory of a reserved buffer and copy ``source`` to it."""
        raise NotImplementedError

    def wait(self, buffer: Tensor) -> None:
        """Make later operators wait for :meth:`fill`."""

    def drop(self, buffer: Tensor) -> None:
        """Free the memory of a buffer."""
        raise NotImplementedError

    def send(self, tensor: Tensor, host: Tier) -> Tensor:
        """Copy a dense tensor's memory to another tier and return the flat copy."""
        with self.host_work(), torch.no_grad():
            copy = host.allocate_waiting(tensor.numel(), tensor.dtype, "activations")
            copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
        return copy

    def bring(self, host_copy: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Return the tensor that :meth:`send` copied, on the device again."""
        with self.host_work():
            waiting = host_copy.as_strided(tuple(shape), tuple(stride))
        with torch.no_grad():
            copy = self._begin(waiting)
        assert copy.tensor is not None
        self._wait_for(copy)
        return copy.tensor

    def fetch(self, tensor: Tensor, target: Tensor, to: Tier, *, add: bool) -> None:
        """Copy a tensor to its place on the host; the copy is complete after :meth:`settle`.

        ``target`` has its shape and dtype and is in the tier ``to``. The tensor is not used here again.
        """
        with self.host_work(), torch.no_grad():
            self._fetches.put(target, staged=tensor.detach().clone(), add=add, event=None, to=to)

    def settle(self) -> None:
        """Wait until all copies of :meth:`fetch` are complete."""
        with self.host_work():
            self._fetches.finish()

    # Early copies

    @property
    def early_copy_bytes(self) -> int:
        """Return the bytes of early copies that were begun and not taken yet."""
        return sum(copy.tensor.nbytes for copy in self._early_copies if copy.tensor is not None)

    def begin(self, host_copy: Tensor, shape: Sequence[int], stride: Sequence[int]) -> EarlyCopy:
        """Begin an early copy as in :meth:`bring`; the tensor counts like a chunk until it is taken."""
        self._charge(host_copy.nbytes, "a saved tensor")
        with self.host_work(), torch.no_grad():
            copy = self._begin(host_copy.as_strided(tuple(shape), tuple(stride)))
        self._early_copies.append(copy)
        return copy

    def _begin(self, waiting: Tensor) -> EarlyCopy:
        back = torch.empty_strided(waiting.shape, waiting.stride(), dtype=waiting.dtype, device=self.device)
        return EarlyCopy(back.copy_(waiting))

    def _wait_for(self, copy: EarlyCopy) -> None:
        """Make operators queued later wait for the end of a copy."""
        if copy.event is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.event)

    def take(self, copy: EarlyCopy) -> Tensor | None:
        """Return the tensor for later operators; None if it was cancelled."""
        tensor, copy.tensor = copy.tensor, None
        if tensor is None:
            return None
        self._early_copies.remove(copy)
        self._discharge(tensor.nbytes)
        self.hold(tensor)
        self._wait_for(copy)
        return tensor

    def call_off(self) -> None:
        """Cancel the early copies to free their memory; :meth:`bring` can copy them later."""
        for copy in self._early_copies:
            assert copy.tensor is not None
            self._discharge(copy.tensor.nbytes)
            copy.tensor = None
        self._early_copies = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the operators inside on this device; needed for a simulated device."""
        yield

    def other_bytes(self) -> int:
        """Return the bytes in use, without chunks."""
        raise NotImplementedError

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor that stays on the device, on devices that do not count it automatically."""

    def mark(self) -> int:
        """Return the peak in bytes since the last call, without chunks."""
        raise NotImplementedError

    def count(self, enabled: bool) -> bool:
        """Count new tensors from here on or not, where counting takes time; return True if they are counted."""
        return True

    def enforce(self) -> Callable[[], None]:
        """Apply the budget to operators too, on devices that do not always do; return a function that undoes it.

        Raises:
            BudgetError: More memory is in use already.
        """
        return lambda: None

    @contextmanager
    def host_work(self) -> Iterator[None]:
        """Exclude operators inside from this device, because they run on the host."""
        yield


def copy_on(stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> torch.cuda.Event:
    """Copy on a side stream after the work queued so far, and return the event at the end."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return event


class CudaDevice(Device):
    """CUDA device. Evicted buffers return their memory to PyTorch's allocator; their views are valid after a reload.

    Example:
        >>> import torch
        >>> from fastfold.memory import CudaDevice, Gemini, SimulatedDevice
        >>> has_gpu = torch.cuda.is_available()
        >>> device = CudaDevice(2**20, torch.device("cuda")) if has_gpu else SimulatedDevice(2**20)
        >>> manager = Gemini(torch.nn.Linear(8, 4), device=device, budget=2**20)
        >>> with device.running(), torch.no_grad():
        ...     manager.model(torch.ones(3, 8, device=device.device)).shape
        torch.Size([3, 4])
        >>> manager.release()
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        super().__init__(budget, device)
        self._stream, self._home = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arriving: dict[int, torch.cuda.Event] = {}

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def enforce(self) -> Callable[[], None]:
        """Limit PyTorch's allocator in this process to the budget, including its cache.

        An allocation over the limit raises ``torch.OutOfMemoryError`` with the limit in its message. Fragmentation can
        leave less usable memory than the budget; expandable segments (``PYTORCH_CUDA_ALLOC_CONF``) reduce it. Memory of
        CUDA, its libraries and NCCL comes on top. The limit applies to all that PyTorch does on this GPU in the
        process. Tested with mocked functions of PyTorch, not on a GPU.
        """
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device)
        if reserved > self.budget:
            raise BudgetError(
                f"PyTorch has reserved {reserved:,} bytes on {self.device} already, more than the budget of "
                f"{self.budget:,}: delete tensors there, set a larger budget, or set hard_budget=False",
                reserved,
            )
        total = torch.cuda.get_device_properties(self.device).total_memory
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        if self.budget / total >= before:
            return lambda: None
        torch.cuda.set_per_process_memory_fraction(self.budget / total, self.device)
        return lambda: torch.cuda.set_per_process_memory_fraction(before, self.device)

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer with an empty storage."""
        buffer = self._own(torch.empty(numel, dtype=dtype, device=self.device))
        buffer.untyped_storage().resize_(0)
        return buffer

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Copy on a side stream; :meth:`wait` joins it."""
        what = "a chunk of parameters"
        try:
            buffer.untyped_storage().resize_(buffer.nbytes)
        except torch.OutOfMemoryError as error:
            used = torch.cuda.memory_allocated(self.device)
            raise DeviceFull(buffer.nbytes, used, self.budget, what) from error
        self._charge(buffer.nbytes, what)
        # Work on the main stream that has not finished may still use the memory.
        self._arriving[buffer.untyped_storage()._cdata] = copy_on(self._stream, buffer, source)
        self.received += buffer.nbytes

    def wait(self, buffer: Tensor) -> None:
        """Make operators queued later wait for the buffer's contents."""
        event = self._arriving.pop(buffer.untyped_storage()._cdata, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def drop(self, buffer: Tensor) -> None:
        """Free the storage after a pending copy."""
        self.wait(buffer)
        buffer.untyped_storage().resize_(0)
        self._discharge(buffer.nbytes)

    def send(self, tensor: Tensor, host: Tier) -> Tensor:
        """Copy on the side stream; the tensor's memory is not reused before the copy ends."""
        copy = host.allocate_waiting(tensor.numel(), tensor.dtype, "activations")
        with torch.no_grad():
            copy_on(self._stream, copy.as_strided(tensor.shape, tensor.stride()), tensor)
        tensor.record_stream(self._stream)
        return copy

    def fetch(self, tensor: Tensor, target: Tensor, to: Tier, *, add: bool) -> None:
        """Copy on a separate stream, through pinned memory if the target is not pinned or is added to."""
        direct = target.is_pinned() and not add
        place = target if direct else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.no_grad():
            event = copy_on(self._home, place, tensor)
        tensor.record_stream(self._home)
        self._fetches.put(target, staged=None if direct else place, add=add, event=event, to=to)

    def _begin(self, waiting: Tensor) -> EarlyCopy:
        back = torch.empty_strided(waiting.shape, waiting.stride(), dtype=waiting.dtype, device=self.device)
        event = copy_on(self._stream, back, waiting)
        # After a cancellation, the memory is not reused before the copy ends.
        back.record_stream(self._stream)
        return EarlyCopy(back, event)

    def other_bytes(self) -> int:
        """Return the bytes that PyTorch has allocated, without chunks."""
        return max(0, torch.cuda.memory_allocated(self.device) - self.used)

    def mark(self) -> int:
        """Return PyTorch's peak since the last call, without the chunks that are on the device."""
        peak = torch.cuda.max_memory_allocated(self.device) - self.used
        torch.cuda.reset_peak_memory_stats(self.device)
        return max(0, peak)
