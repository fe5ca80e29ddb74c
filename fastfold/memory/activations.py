"""Saved activations at home between the forward and the backward pass.

What autograd keeps for the backward pass is used in reverse order: the planner's rule (farthest next use leaves first)
sends the first layers' tensors home and keeps the last ones. A tensor's place is decided when it is saved, from the
plan of the last pass like this one; in a first pass all go home.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .devices import Device
from .planner import plan
from .schedule import Access
from .tiers import Tier


class _Saved:
    """A tensor that autograd has saved: here, or its copy at home."""

    def __init__(
        self, index: int, tensor: Tensor | None, home: Tensor | None, like: tuple[torch.Size, tuple[int, ...]]
    ):
        self.index, self.tensor, self.home = index, tensor, home
        self.shape, self.stride = like


class ActivationTier:
    """Keeps saved tensors within a budget; what exceeds it waits at home and returns when it is used.

    Args:
        model: Its parameters are left alone; it may be managed by :class:`fastfold.memory.Gemini`.
        device: What computes.
        budget: Bytes of saved tensors that may stay on the device between their saving and their use. A manager of
            parameters on the same device makes room for them, but does not plan for both together.
        home: Where the others wait; None for the host's memory.
        smallest: Bytes below which a tensor is not worth moving.

    Attributes:
        sent: Bytes sent home so far; as many come back.
    """

    def __init__(
        self, model: nn.Module, device: Device, budget: int, home: Tier | None = None, smallest: int = 1024
    ) -> None:
        self.model = model
        self.device, self.budget, self.smallest = device, budget, smallest
        self.home = home if home is not None else Tier(pinned=device.device.type == "cuda")
        self.sent = 0
        self._leaving: dict[tuple[int, ...], frozenset[int]] = {}

    @contextmanager
    def saving(self, key: tuple[int, ...] = ()) -> Iterator[None]:
        """Tensors saved inside are looked after, until the backward pass has used them.

        Args:
            key: What tells passes apart that save different tensors, such as the shapes of their inputs. A pass that
                saves other tensors than the last one of its key is correct all the same, and planned anew.
        """
        parameters = {p.untyped_storage()._cdata for p in self.model.parameters()}
        leaving = self._leaving.get(key)
        sizes: list[int] = []
        uses: list[int] = []

        def pack(tensor: Tensor) -> Tensor | _Saved:
            # Parameters are saved too; where they live is decided elsewhere.
            fixed = tensor.untyped_storage()._cdata in parameters or self.device.owns(tensor)
            if fixed or tensor.nbytes < self.smallest or not _dense(tensor):
                return tensor
            index = len(sizes)
            sizes.append(tensor.nbytes)
            like = (tensor.shape, tensor.stride())
            if leaving is not None and index not in leaving:
                return _Saved(index, tensor, None, like)
            with self.device.host_work(), torch.no_grad():
                home = self.home.allocate(tensor.numel(), tensor.dtype, "activations")
                home.as_strided(*like).copy_(tensor)
            self.sent += tensor.nbytes
            return _Saved(index, None, home, like)

        def unpack(saved: Tensor | _Saved) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            uses.append(saved.index)
            if saved.tensor is not None:
                return saved.tensor
            assert saved.home is not None
            back = torch.empty_strided(
                saved.shape, saved.stride, dtype=saved.home.dtype, device=self.device.device
            )
            return back.copy_(saved.home.as_strided(saved.shape, saved.stride))

        # The hooks live as long as the graph: when it goes, the order of uses is known.
        with saved_tensors_hooks(pack, unpack):
            yield
        weakref.finalize(unpack, self._learn, key, sizes, uses)

    def _learn(self, key: tuple[int, ...], sizes: list[int], uses: list[int]) -> None:
        """Plans the next pass of this key from the order of this one's uses."""
        if not uses:
            return
        trace = [Access(frozenset({i})) for i in (*range(len(sizes)), *uses)]
        table = dict(enumerate(sizes))
        room = max(self.budget, max(sizes))
        (first, *_) = plan(trace, table, room, volatile=frozenset(table), lookahead=0).cycles
        self._leaving[key] = frozenset(chunk for step in first[len(sizes) :] for chunk in step.load)


def _dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.layout is torch.strided
