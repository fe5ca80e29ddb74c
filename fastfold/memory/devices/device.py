"""What computes, with a budget: the interface, and a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fastfold.memory.devices.fetches import Fetches
from fastfold.memory.devices.tiers import Tier
from fastfold.memory.planner.schedule import BudgetError


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


class Arriving:
    """A tensor that is on its way to a device before it is needed.

    Args:
        tensor: Where it arrives.
        event: On a GPU, what its copy ends with.

    Attributes:
        tensor: As given; None when it has been taken or called off.
    """

    def __init__(self, tensor: Tensor, event: torch.cuda.Event | None = None) -> None:
        self.tensor: Tensor | None = tensor
        self.event = event


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
        self._coming: list[Arriving] = []
        self._fetches = Fetches()

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

    def send(self, tensor: Tensor, host: Tier) -> Tensor:
        """A copy of a dense tensor's memory, flat, on another tier."""
        with self.host_work(), torch.no_grad():
            copy = host.allocate_waiting(tensor.numel(), tensor.dtype, "activations")
            copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
        return copy

    def bring(self, host_copy: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """The tensor that :meth:`send` copied, on the device again."""
        with self.host_work():
            waiting = host_copy.as_strided(tuple(shape), tuple(stride))
        back = torch.empty_strided(tuple(shape), tuple(stride), dtype=host_copy.dtype, device=self.device)
        return back.copy_(waiting)

    def fetch(self, tensor: Tensor, target: Tensor, to: Tier, *, add: bool) -> None:
        """Copy a tensor that is not needed here any more to its place on the host; done after :meth:`settle`.

        Args:
            tensor: Here.
            target: Of its shape and dtype, on the host.
            to: Where the place is.
            add: Whether to add to what is there.
        """
        with self.host_work(), torch.no_grad():
            self._fetches.put(target, staged=tensor.detach().clone(), add=add, event=None, to=to)

    def settle(self) -> None:
        """What was fetched is in its place after this."""
        with self.host_work():
            self._fetches.finish()

    def hand_over(self, buffer: Tensor) -> Callable[[], None]:
        """What was fetched to a buffer on the host and is not in its place yet: a function that any thread may call."""
        return self._fetches.hand_over(buffer)

    # Before they are needed

    @property
    def coming_bytes(self) -> int:
        """Bytes of what :meth:`begin` has begun and nobody has taken yet."""
        return sum(arriving.tensor.nbytes for arriving in self._coming if arriving.tensor is not None)

    def begin(self, host_copy: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Arriving:
        """Begin what :meth:`bring` does. Until it is taken, the tensor counts as chunks do, not among other things."""
        self._charge(host_copy.nbytes, "a saved tensor")
        with self.host_work(), torch.no_grad():
            arriving = self._begin(host_copy.as_strided(tuple(shape), tuple(stride)))
        self._coming.append(arriving)
        return arriving

    def _begin(self, waiting: Tensor) -> Arriving:
        back = torch.empty_strided(waiting.shape, waiting.stride(), dtype=waiting.dtype, device=self.device)
        return Arriving(back.copy_(waiting))

    def take(self, arriving: Arriving) -> Tensor | None:
        """The tensor, for operators after this; None if it was called off."""
        tensor, arriving.tensor = arriving.tensor, None
        if tensor is None:
            return None
        self._coming.remove(arriving)
        self._discharge(tensor.nbytes)
        self.hold(tensor)
        return tensor

    def call_off(self) -> None:
        """Give up what is on its way: the room is needed. It can be brought when it is needed."""
        for arriving in self._coming:
            assert arriving.tensor is not None
            self._discharge(arriving.tensor.nbytes)
            arriving.tensor = None
        self._coming = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operators inside run on this device; only a simulated one needs to be told."""
        yield

    def other_bytes(self) -> int:
        """Bytes of things other than chunks now."""
        raise NotImplementedError

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor that stays on the device, where that does not happen by itself."""

    def mark(self) -> int:
        """Most bytes of things other than chunks since the last call."""
        raise NotImplementedError

    def enforce(self) -> Callable[[], None]:
        """From now on operators may not take more than the budget either, where that is not so anyway.

        Returns:
            Undoes it.

        Raises:
            BudgetError: More is taken already.
        """
        return lambda: None

    @contextmanager
    def host_work(self) -> Iterator[None]:
        """What happens inside is not the device's work."""
        yield


class CudaDevice(Device):
    """A GPU. Evicted buffers give their memory back to PyTorch's allocator; views of them come alive on a reload.

    Args:
        budget: Bytes that chunks and activations may take together.
        device: For example ``cuda:0``.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        super().__init__(budget, device)
        self._stream, self._home = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arriving: dict[int, torch.cuda.Event] = {}

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def enforce(self) -> Callable[[], None]:
        """PyTorch's allocator of this process keeps to the budget, with what it has cached: it gives that back first.

        What it has no room for raises ``torch.OutOfMemoryError``, whose message names the limit. Parts of its segments
        may be in nobody's use, so there is less room than the budget says; expandable segments
        (``PYTORCH_CUDA_ALLOC_CONF``) leave few such parts. CUDA itself, its libraries and NCCL take memory on top. The
        limit is the process's, for all that PyTorch does on this GPU. Tested with stand-ins for PyTorch's functions
        alone, and never run on a GPU.
        """
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device)
        if reserved > self.budget:
            raise BudgetError(
                f"PyTorch holds {reserved:,} bytes on {self.device} already, more than the budget of {self.budget:,}: "
                "delete what is there, give a larger budget, or set hard_budget=False",
                reserved,
            )
        total = torch.cuda.get_device_properties(self.device).total_memory
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        if self.budget / total >= before:
            return lambda: None
        torch.cuda.set_per_process_memory_fraction(self.budget / total, self.device)
        return lambda: torch.cuda.set_per_process_memory_fraction(before, self.device)

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer whose storage is empty."""
        buffer = self._own(torch.empty(numel, dtype=dtype, device=self.device))
        buffer.untyped_storage().resize_(0)
        return buffer

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Copies on a side stream; :meth:`wait` joins it."""
        what = "a chunk of parameters"
        try:
            buffer.untyped_storage().resize_(buffer.nbytes)
        except torch.OutOfMemoryError as error:
            used = torch.cuda.memory_allocated(self.device)
            raise DeviceFull(buffer.nbytes, used, self.budget, what) from error
        self._charge(buffer.nbytes, what)
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

    def send(self, tensor: Tensor, host: Tier) -> Tensor:
        """Copies on the side stream; the tensor's memory is not reused before that is done."""
        copy = host.allocate_waiting(tensor.numel(), tensor.dtype, "activations")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return copy

    def bring(self, host_copy: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Copies on the side stream, after :meth:`send`; operators queued after this find the contents."""
        main = torch.cuda.current_stream(self.device)
        back = torch.empty_strided(tuple(shape), tuple(stride), dtype=host_copy.dtype, device=self.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream), torch.no_grad():
            back.copy_(host_copy.as_strided(tuple(shape), tuple(stride)), non_blocking=True)
        main.wait_stream(self._stream)
        back.record_stream(self._stream)
        return back

    def fetch(self, tensor: Tensor, target: Tensor, to: Tier, *, add: bool) -> None:
        """Copies on a stream of its own, through pinned memory where the place is not pinned or holds a sum."""
        direct = target.is_pinned() and not add
        place = target if direct else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._home.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._home), torch.no_grad():
            place.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        tensor.record_stream(self._home)
        self._fetches.put(target, staged=None if direct else place, add=add, event=event, to=to)

    def _begin(self, waiting: Tensor) -> Arriving:
        back = torch.empty_strided(waiting.shape, waiting.stride(), dtype=waiting.dtype, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            back.copy_(waiting, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        # Called off, its memory is not reused before the copy is done.
        back.record_stream(self._stream)
        return Arriving(back, event)

    def take(self, arriving: Arriving) -> Tensor | None:
        """The tensor; operators queued after this wait for its contents, and no others."""
        tensor = super().take(arriving)
        if tensor is not None and arriving.event is not None:
            torch.cuda.current_stream(self.device).wait_event(arriving.event)
        return tensor

    def other_bytes(self) -> int:
        """What PyTorch has allocated, without chunks."""
        return max(0, torch.cuda.memory_allocated(self.device) - self.used)

    def mark(self) -> int:
        """PyTorch's peak since the last call without the chunks that are here now."""
        peak = torch.cuda.max_memory_allocated(self.device) - self.used
        torch.cuda.reset_peak_memory_stats(self.device)
        return max(0, peak)
