"""Simulated accelerator on the CPU, for testing placement policies without a GPU.

Transfers over PCIe are counted in bytes, not in time. On the device ``meta``, tensors have sizes without memory. This
allows programs that are too large for the machine. Where the program reads a number, it reads 1.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastfold.memory.devices.device import Device, DeviceFull


class Allocator(Protocol):
    """Model of the allocator of an accelerator."""

    def allocate(self, nbytes: int) -> Any:
        """Return a block for a tensor of ``nbytes``; raise :class:`DeviceFull` if it does not fit."""

    def free(self, block: Any) -> None:
        """Free a block."""


class SimulatedDevice(Device):
    """Simulated accelerator on the CPU with a hard budget.

    Inside :meth:`running`, every tensor that an operator makes counts until its memory is freed. More than the budget
    raises :class:`DeviceFull`. Workspaces inside a kernel are not counted. Operators defined in Python
    (``torch.library.custom_op``) run, so their tensors are counted. A dropped buffer is filled with NaN, so that an
    unexpected access changes the loss.

    Args:
        budget: Budget in bytes.
        device: ``cpu``, or ``meta`` for sizes without memory.
        allocator: Model of the allocator that holds the operators' tensors, with its own limit; None to count exact
            bytes.

    Example:
        >>> import torch
        >>> from fastfold.memory import SimulatedDevice
        >>> device = SimulatedDevice(budget=1000)
        >>> with device.running():
        ...     x = torch.zeros(100) + 1
        >>> device.used, device.peak  # 4 bytes a number; the zeros are freed after the addition
        (400, 800)
    """

    def __init__(self, budget: int, device: str = "cpu", *, allocator: Allocator | None = None) -> None:
        super().__init__(budget, torch.device(device))
        self.allocator = allocator
        self._blocks: dict[int, Any] = {}
        self.other = self._highest = 0
        self._known: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._paused = 0
        self._meters: list[_MemoryMeter] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the tensors of operators inside."""
        meter = _MemoryMeter(self)
        self._meters.append(meter)
        meter.enter()
        try:
            yield
        finally:
            meter.leave()
            self._meters.pop()

    def count(self, enabled: bool) -> bool:
        """Count the tensors that operators make from here on, or not; return True if they are counted."""
        for meter in self._meters[-1:]:
            meter.enter() if enabled else meter.leave()
        return all(meter.depth for meter in self._meters[-1:])

    @contextmanager
    def host_work(self) -> Iterator[None]:
        """Do not count the tensors of operators inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer of NaN (zeros for integers) that is not counted yet."""
        buffer = self._own(torch.zeros(numel, dtype=dtype))
        _poison(buffer)
        return buffer

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Count the buffer and copy ``source``."""
        self._charge(buffer.nbytes, "a chunk of parameters")
        buffer.copy_(source)
        self.received += buffer.nbytes

    def drop(self, buffer: Tensor) -> None:
        """Fill the buffer with NaN and stop counting it."""
        _poison(buffer)
        self._discharge(buffer.nbytes)

    def other_bytes(self) -> int:
        """Return the bytes of operators' tensors."""
        return self.other

    def mark(self) -> int:
        """Return the peak of operators' tensors since the last call, in bytes."""
        highest, self._highest = self._highest, self.other
        return highest

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor of an operator or of the batch until its memory is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._paused or key in self._known or key in self._buffers:
            return
        if tensor.device.type != self.device.type:
            return
        size = storage.nbytes()
        self._charge(size, "a tensor made by an operator")
        self._known[key] = size
        self._place(key, size)
        self.other += size
        self._highest = max(self._highest, self.other)
        self._references[key] = weakref.ref(storage, functools.partial(self._gone, key))

    def resized(self, tensor: Tensor) -> None:
        """Update the count of a tensor whose memory was freed or allocated again."""
        storage = tensor.untyped_storage()
        more = storage.nbytes() - self._known[storage._cdata]
        if more > 0:
            self._charge(more, "memory of a tensor")
        else:
            self._discharge(-more)
        self._known[storage._cdata] += more
        self._place(storage._cdata, storage.nbytes())
        self.other += more
        self._highest = max(self._highest, self.other)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Mark a tensor's memory as the host's, so that its views are not counted."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = 0
        weakref.finalize(storage, self._known.pop, storage._cdata, None)
        return tensor

    def _place(self, key: int, size: int) -> None:
        if self.allocator is None:
            return
        before = self._blocks.pop(key, None)
        if before is not None:
            self.allocator.free(before)
        if size:
            self._blocks[key] = self.allocator.allocate(size)

    def _gone(self, key: int, _: object) -> None:
        del self._references[key]
        size = self._known.pop(key)
        self._place(key, 0)
        self.other -= size
        self._discharge(size)

    def _charge(self, size: int, what: str) -> None:
        if self.used + size > self.budget:
            raise DeviceFull(size, self.used, self.budget, what)
        super()._charge(size, what)


class _MemoryMeter(TorchDispatchMode):
    """Dispatch mode that reports the tensors of operators to a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._simulated = device
        #: Height of the stack of modes with this one at its top; 0 while it is left
        self.depth = 0
        self._below, self._is_inference = _height(), torch.is_inference_mode_enabled()

    def _is_outermost(self) -> bool:
        """Return False in an inference mode that was entered since: its end restores the modes of its beginning."""
        return torch.is_inference_mode_enabled() == self._is_inference

    def enter(self) -> None:
        """Enter the mode, unless another one was entered since and would be left in its place."""
        if not self.depth and _height() == self._below and self._is_outermost():
            self.__enter__()
            self.depth = _height()

    def leave(self) -> None:
        """Leave the mode, if it is the innermost one."""
        if self.depth and _height() == self.depth and self._is_outermost():
            self.__exit__(None, None, None)
            self.depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every operator would take longer than counting

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._simulated.device.type == "meta":
            if (answer := _answer(func, args, kwargs)) is not None:
                return answer
        elif self._simulated._paused:
            return func(*args, **kwargs)
        parts = _parts(func)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        out = func(*args, **kwargs)
        if func.is_view and out is args[0]:
            return out
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._simulated.hold(leaf)
        return out


def _height() -> int:
    return int(torch._C._len_torch_dispatch_stack())


@functools.cache
def _parts(func: Any) -> Callable[..., Any] | None:
    """Return a function that runs the parts of an operator; None to run it whole.

    Without autograd, as in inference mode, operators with parts reach a dispatch mode unchanged. An operator whose
    result may be a view makes no other tensor. ``to`` may copy to the host, which a part of it tells.
    """
    if func.is_view and func.overloadpacket is not torch.ops.aten.to:
        return None
    definition = OPDEFS.get(func._schema.name)
    if definition is not None:
        return definition._init_fn
    return func.decompose if func._can_decompose() else None


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the values that the program reads of a tensor without memory; None if it reads none."""
    if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
        return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
    to_host = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
    return torch.ones(args[0].shape, dtype=args[0].dtype) if to_host and args[0].is_meta else None


def _poison(buffer: Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
