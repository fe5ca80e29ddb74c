"""Saved activations between forward and backward pass: kept, recomputed, or offloaded to the host.

The backward pass uses saved tensors in reverse order, so their next use is known like that of parameter chunks. One
plan covers both (:func:`fastfold.memory.planner.planner.choose_spans`). If a block is recomputed, only its inputs are
saved, and these may be offloaded. In a first step, before any measurement, every block is recomputed and all other
saved tensors are offloaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

from fastfold.memory.devices.device import Device, EarlyCopy
from fastfold.memory.devices.tiers import Tier
from fastfold.memory.gemini.access_trace import SpanKey
from fastfold.memory.gemini.chunks import is_dense

# Smaller tensors are not offloaded.
SMALLEST = 1024


class Ledger(Protocol):
    """Planner that is told about saved tensors and decides which of them stay."""

    def new_call(self) -> int:
        """Return the number of a block's call in this step."""

    def stays(self, key: SpanKey, size: int) -> bool:
        """Report a saved tensor of ``size`` bytes; return True if it stays on the device."""

    def resize(self, key: SpanKey, size: int) -> None:
        """Correct the size of a tensor."""

    def used(self, key: SpanKey) -> None:
        """Report that the backward pass uses a tensor."""

    def due(self) -> Mapping[SpanKey, int]:
        """Return the tensors to bring back now, with the free bytes; each is returned once."""


class _Saved:
    """Tensor saved by autograd, on the device or as a host copy; one without a key in the step is never moved."""

    # It is detached from its graph, because the graph refers to its saved tensors: a cycle would keep both alive.

    def __init__(self, tensor: Tensor, key: SpanKey | None = None, host_copy: Tensor | None = None) -> None:
        self.key, self.host_copy = key, host_copy
        self.early_copy: EarlyCopy | None = None
        # A tensor of several operators stays from its first use to its last, as it would without a manager.
        self.is_shared = False
        self.returned: Tensor | None = None
        self.shape, self.stride = tensor.shape, tensor.stride()
        # Shares the version counter, even if its memory is freed.
        self.here = tensor.detach()
        self._version = tensor._version
        if host_copy is not None:
            self.here.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse a tensor that was changed in place, as autograd does for tensors that it saves."""
        if self.here._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.shape)} is at version {self.here._version}, expected {self._version}. "
                "Change a copy of it instead"
            )


class SavedTensors:
    """Manager of the tensors that autograd saves in one model.

    ``sent`` is bytes offloaded so far; the same number returns, and ``waited`` is the part that returned only at its
    use. ``recomputed`` counts calls of blocks.
    """

    def __init__(self, device: Device, host: Tier, ledger: Ledger) -> None:
        self.device, self.host, self.ledger = device, host, ledger
        self.sent = self.waited = self.recomputed = 0
        self._away: weakref.WeakValueDictionary[SpanKey, _Saved] = weakref.WeakValueDictionary()
        # By base and view, the tensors saved in this pass.
        self._saved: dict[tuple[object, ...], tuple[TensorWeakRef, weakref.ref[_Saved]]] = {}
        self._call = -1
        self._count = 0
        self._inside = False

    def hooks(self) -> saved_tensors_hooks:
        """Return the context of a forward pass in which saved tensors are managed."""
        self._call, self._count = -1, 0
        self._saved.clear()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Saved:
        # Parameters are saved too; the chunk store places them.
        if self._inside or self.device.owns(tensor) or tensor.nbytes < SMALLEST or not is_dense(tensor):
            return _Saved(tensor)
        # Several operators may save one tensor, such as the input of three projections.
        owner = tensor if tensor._base is None else tensor._base
        view = id(owner), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version
        if view in self._saved:
            known, saved = (reference() for reference in self._saved[view])
            if known is owner and saved is not None:
                saved.is_shared = True
                return saved
        saved = self._save(tensor, ("saved", self._call, self._count))
        self._count += 1
        self._saved[view] = TensorWeakRef(owner), weakref.ref(saved)
        return saved

    def _save(self, tensor: Tensor, key: SpanKey) -> _Saved:
        if self.ledger.stays(key, tensor.nbytes):
            return _Saved(tensor, key)
        self.sent += tensor.nbytes
        self._away[key] = saved = _Saved(tensor, key, self.device.send(tensor, self.host))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        saved.check()
        if saved.key is not None:
            self.ledger.used(saved.key)
        if saved.host_copy is None:
            return saved.here
        if saved.returned is not None:
            return saved.returned
        tensor = None if saved.early_copy is None else self.device.take(saved.early_copy)
        if tensor is None:
            self.waited += saved.host_copy.nbytes
            tensor = self.device.bring(saved.host_copy, saved.shape, saved.stride)
        if saved.is_shared:
            saved.returned = tensor
        return tensor

    def begin_due(self) -> None:
        """Begin to bring back tensors that the backward pass will use soon."""
        for key, room in self.ledger.due().items():
            saved = self._away.pop(key, None)
            if saved is not None and saved.host_copy is not None and saved.host_copy.nbytes <= room:
                saved.early_copy = self.device.begin(saved.host_copy, saved.shape, saved.stride)

    # Blocks

    def manage(self, blocks: Iterable[nn.Module]) -> Callable[[], None]:
        """Recompute modules in the backward pass where their saved tensors do not stay.

        Their forward pass is deterministic for equal random numbers. The result is a function that undoes it.
        """
        wrapped = list(dict.fromkeys(blocks))
        before = [block.__dict__.get("forward") for block in wrapped]
        for block in wrapped:
            block.forward = self._recomputable(block.forward)

        def undo() -> None:
            for block, forward in zip(wrapped, before, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward

        return undo

    def _recomputable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Inside a block that is recomputed or kept as a whole, or in a backward pass, the choice is made already.
            if not torch.is_grad_enabled() or self._inside or torch._C._current_graph_task_id() != -1:
                return forward(*args, **kwargs)
            key = ("block", self.ledger.new_call(), 0)
            if self.ledger.stays(key, 0):
                self._inside = True
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._inside = False
            outside = self._call, self._count
            self._call, self._count = key[1], 0
            try:
                return checkpoint(self._measured(forward, key), *args, use_reentrant=False, **kwargs)
            finally:
                self._call, self._count = outside

        return run

    def _measured(self, forward: Callable[..., Any], key: SpanKey) -> Callable[..., Any]:
        """Wrap the forward function to measure its saved tensors when it is recomputed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                return forward(*args, **kwargs)
            self.recomputed += 1
            self.ledger.used(key)
            before = self.device.other_bytes()
            try:
                return forward(*args, **kwargs)
            finally:
                # It ends with an exception once all saved tensors are recomputed.
                self.ledger.resize(key, max(0, self.device.other_bytes() - before))

        return run
