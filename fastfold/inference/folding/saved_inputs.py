"""Inputs of recomputed blocks, offloaded to the host between forward and backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd.graph import saved_tensors_hooks

from fastfold.memory.devices.device import CudaDevice, Device
from fastfold.memory.devices.tiers import Tier
from fastfold.memory.gemini.access_trace import SpanKey
from fastfold.memory.gemini.activations import SavedTensors


class SavedInputs:
    """Manager of large saved tensors: the first ones of a pass wait on the host, the others stay.

    The backward pass needs the first ones last. Each is copied back while the block after it is recomputed. Tensors of
    ``smallest`` bytes and more take at most ``host`` bytes there, in the memory ``tier``, by default pinned for a GPU.
    """

    def __init__(
        self, host: int, smallest: int, device: Device | torch.device, tier: Tier | None = None
    ) -> None:
        self._host, self._smallest = host, smallest
        if isinstance(device, torch.device):
            device = CudaDevice(0, device) if device.type == "cuda" else Device(0, device)
        self.tier = tier or Tier(pinned=device.device.type == "cuda")
        self.saved = SavedTensors(device, self.tier, self)
        self._away: list[SpanKey] = []
        self._next: dict[SpanKey, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """Return the context of a forward pass whose saved tensors are managed."""
        self._away, self._next = [], {}
        return self.saved.hooks()

    @property
    def peak(self) -> int:
        """Largest number of bytes on the host."""
        return self.tier.peak

    # The decisions that SavedTensors asks for.

    def new_call(self) -> int:
        """Return the number of a block's call; blocks are recomputed by the network."""
        return 0

    def stays(self, key: SpanKey, size: int) -> bool:
        """Return True if a tensor is small, or the host is full."""
        if size < self._smallest or self.tier.used + size > self._host:
            return True
        self._away.append(key)
        return False

    def resize(self, key: SpanKey, size: int) -> None:
        """Do nothing, because sizes are those of the tensors."""

    def used(self, key: SpanKey) -> None:
        """Begin to bring back the tensor that the backward pass uses after this one."""
        if key in self._away:
            before = self._away[: self._away.index(key)]
            self._next = dict.fromkeys(before[-1:], 1 << 62)
            self.saved.begin_due()

    def due(self) -> Mapping[SpanKey, int]:
        """Return the tensor to bring back now."""
        found, self._next = self._next, {}
        return found
