"""Saved activations between the forward and the backward pass: kept, recomputed, or sent to the host.

What autograd saves is used again in reverse order, so its next use is as well known as that of a chunk of parameters,
and one plan decides about both (:func:`fastfold.memory.planner.planner.choose_spans`). A block may be recomputed: then
its inputs alone are saved, and these may wait on the host. In a first step, before anything has been measured, every
block is recomputed and everything else that is saved goes to the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fastfold.memory.devices.device import Arriving, Device
from fastfold.memory.devices.tiers import Tier
from fastfold.memory.gemini.access_trace import SpanKey
from fastfold.memory.gemini.chunks import is_dense

# Tensors of fewer bytes are not worth moving.
SMALLEST = 1024


class Ledger(Protocol):
    """Who plans: told what is saved and used, and asked what stays."""

    def new_call(self) -> int:
        """Number of a block's call in this step."""

    def stays(self, key: SpanKey, size: int) -> bool:
        """Something of ``size`` bytes is saved; whether it stays on the device."""

    def resize(self, key: SpanKey, size: int) -> None:
        """Its size has turned out to be another."""

    def used(self, key: SpanKey) -> None:
        """The backward pass needs it."""

    def due(self) -> Mapping[SpanKey, int]:
        """What is to begin to come back now, and bytes that there is room for; each is told once."""


class _Saved:
    """A tensor that autograd has saved: here, or its host copy.

    It is kept without what computed it: that holds on to what it saves, and the two would keep each other alive.

    Args:
        tensor: What is saved.
        key: Its number in the step; None for what stays wherever it is.
        host_copy: Where it waits, if it is not kept here.
    """

    def __init__(self, tensor: Tensor, key: SpanKey | None = None, host_copy: Tensor | None = None) -> None:
        self.key, self.host_copy = key, host_copy
        self.arriving: Arriving | None = None
        self.shape, self.stride = tensor.shape, tensor.stride()
        # Shares the count of changes, even when its memory is not needed.
        self.here = tensor.detach()
        self._version = tensor._version
        if host_copy is not None:
            self.here.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse what has been changed since, as autograd does where it looks after what it saves itself."""
        if self.here._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.shape)} is at version {self.here._version}, expected {self._version}. "
                "Change a copy of it instead"
            )


class SavedTensors:
    """Looks after what autograd saves in one model.

    Args:
        device: What computes.
        host: Where tensors wait.
        ledger: Who plans.

    Attributes:
        sent: Bytes sent to the host so far; as many come back.
        waited: Bytes of them that began to come back only when they were used.
        recomputed: Calls of blocks that were recomputed.
    """

    def __init__(self, device: Device, host: Tier, ledger: Ledger) -> None:
        self.device, self.host, self.ledger = device, host, ledger
        self.sent = self.waited = self.recomputed = 0
        self._away: weakref.WeakValueDictionary[SpanKey, _Saved] = weakref.WeakValueDictionary()
        self._call = -1
        self._count = 0
        self._inside = False

    def hooks(self) -> saved_tensors_hooks:
        """Context of a forward pass, in which saved tensors are looked after."""
        self._call, self._count = -1, 0
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Saved:
        # Parameters are saved too; where they live is decided elsewhere.
        if self._inside or self.device.owns(tensor) or tensor.nbytes < SMALLEST or not is_dense(tensor):
            return _Saved(tensor)
        key = ("saved", self._call, self._count)
        self._count += 1
        if self.ledger.stays(key, tensor.nbytes):
            return _Saved(tensor, key)
        self.sent += tensor.nbytes
        saved = _Saved(tensor, key, self.device.send(tensor, self.host))
        self._away[key] = saved
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        saved.check()
        if saved.key is not None:
            self.ledger.used(saved.key)
        if saved.host_copy is None:
            return saved.here
        tensor = None if saved.arriving is None else self.device.take(saved.arriving)
        if tensor is None:
            self.waited += saved.host_copy.nbytes
            tensor = self.device.bring(saved.host_copy, saved.shape, saved.stride)
        return tensor

    def begin_due(self) -> None:
        """Have come back what the backward pass has not asked for yet, but will soon."""
        for key, room in self.ledger.due().items():
            saved = self._away.pop(key, None)
            if saved is not None and saved.host_copy is not None and saved.host_copy.nbytes <= room:
                saved.arriving = self.device.begin(saved.host_copy, saved.shape, saved.stride)

    # Blocks

    def manage(self, blocks: Iterable[nn.Module]) -> Callable[[], None]:
        """From now on these modules are recomputed in the backward pass where their saved tensors do not stay.

        Args:
            blocks: Modules whose forward pass can be repeated, with equal results for equal random numbers.

        Returns:
            Undoes it.
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
            # Within a block that is recomputed or kept as a whole, or in a backward pass, there is no choice left.
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
        """The forward function; when it runs in the backward pass, what it saves is what would have stayed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                return forward(*args, **kwargs)
            self.recomputed += 1
            self.ledger.used(key)
            before = self.device.other_bytes()
            try:
                return forward(*args, **kwargs)
            finally:
                # It ends by an exception as soon as everything saved is there again.
                self.ledger.resize(key, max(0, self.device.other_bytes() - before))

        return run
