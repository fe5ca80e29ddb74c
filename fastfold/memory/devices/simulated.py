"""A CPU with the manners of a small accelerator: placement policies are tested on it without a GPU.

It has a hard budget, it counts every tensor that an operator makes, and what has left it reads as NaN. What would move
over PCIe is counted, what that would cost in time is not.

On the device ``meta`` the same without memory and contents, for programs that are too large for the machine: tensors
have sizes alone, and where the program asks for a number it reads one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastfold.memory.devices.caching_allocator import Block, CachingAllocator
from fastfold.memory.devices.device import Device, DeviceFull


class SimulatedDevice(Device):
    """A CPU with the manners of a small accelerator.

    Inside :meth:`running` every tensor that an operator makes here takes room until its memory goes; what would exceed
    the budget raises :class:`DeviceFull`. Workspaces inside a kernel are not seen, but operators that are defined in
    Python (``torch.library.custom_op``) are run, so that what they make is. A dropped buffer is filled with NaN, so
    that an access that was not announced shows in the loss.

    Args:
        budget: Bytes.
        device: Where its tensors are: ``cpu``, or ``meta`` for sizes alone.
        allocator: What holds the operators' tensors, which has a limit of its own; None for exact bytes alone.
    """

    def __init__(
        self, budget: int, device: str = "cpu", *, allocator: CachingAllocator | None = None
    ) -> None:
        super().__init__(budget, torch.device(device))
        self.allocator = allocator
        self._blocks: dict[int, Block] = {}
        self.other = self._highest = 0
        self._known: dict[int, int] = {}
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

    def other_bytes(self) -> int:
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
        elsewhere = tensor.device.type != self.device.type
        if self._paused or elsewhere or key in self._known or key in self._buffers:
            return
        self._charge(size, "a tensor made by an operator")
        self._known[key] = size
        self._place(key, size)
        self.other += size
        self._highest = max(self._highest, self.other)
        weakref.finalize(storage, self._gone, key)

    def resized(self, tensor: Tensor) -> None:
        """Counts a tensor anew whose memory was given back, or asked for again."""
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
        """Notes that a tensor's memory is the host's, so that views made of it later are not counted."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = 0
        weakref.finalize(storage, self._known.pop, storage._cdata, None)
        return tensor

    def _place(self, key: int, size: int) -> None:
        """Have the allocator hold a tensor of another size than before."""
        if self.allocator is None:
            return
        before = self._blocks.pop(key, None)
        if before is not None:
            self.allocator.free(before)
        if size:
            self._blocks[key] = self.allocator.allocate(size)

    def _gone(self, key: int) -> None:
        size = self._known.pop(key)
        self._place(key, 0)
        self.other -= size
        self._discharge(size)

    def _charge(self, size: int, what: str) -> None:
        if self.used + size > self.budget:
            raise DeviceFull(size, self.used, self.budget, what)
        super()._charge(size, what)


class _Meter(TorchDispatchMode):
    """Shows a simulated device every tensor that operators make."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._simulated = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._simulated.device.type == "meta" and _is_question(func, args, kwargs):
            return _answer(func, args[0])
        definition = OPDEFS.get(func._schema.name)
        if definition is not None:
            with self:
                return definition._init_fn(*args, **kwargs)
        with self:
            # In inference mode, operators made of others come here whole.
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._simulated.hold(leaf)
        return out


def _is_question(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the program wants to know contents of a tensor that has none."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return bool(args[0].is_meta)
    to_host = kwargs.get("device") == torch.device("cpu")
    return func is torch.ops.aten._to_copy.default and to_host and bool(args[0].is_meta)


def _answer(func: Any, tensor: Tensor) -> Any:
    """Ones."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _poison(buffer: Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
