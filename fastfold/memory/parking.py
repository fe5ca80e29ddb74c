"""Tensors that wait on another tier between two uses, under the eyes of whoever uses them.

Inside a model, the planner finds the uses itself; a loop around it (recycling, templates) knows them beforehand:

    parking = Parking(device)
    waiting = parking.park(pair)
    del pair
    ...
    pair = waiting.take()
"""

from __future__ import annotations

import torch
from torch import Tensor

from .devices import Device
from .tiers import Tier


class Parking:
    """Sends tensors away and brings them back.

    Args:
        device: What computes.
        home: Where they wait; None for the host's memory, page-locked for a GPU.

    Attributes:
        sent: Bytes sent so far.
    """

    def __init__(self, device: Device, home: Tier | None = None) -> None:
        self.device = device
        self.home = home if home is not None else Tier(pinned=device.device.type == "cuda")
        self.sent = 0

    def park(self, tensor: Tensor) -> Parked:
        """Copies a tensor away; its memory on the device goes with its last reference.

        Args:
            tensor: Any shape, of the device; without a gradient, which would be lost.

        Raises:
            OutputError: The tier is a disk, and it is full.
        """
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "a tensor that records gradients cannot be parked: its history would keep it here"
            )
        dense = tensor.contiguous()
        self.sent += dense.nbytes
        return Parked(self.device, self.device.send(dense, self.home), dense)


class Parked:
    """A tensor that waits; made by :meth:`Parking.park`."""

    def __init__(self, device: Device, home: Tensor, like: Tensor) -> None:
        self._device, self._home = device, home
        self.shape, self._stride = like.shape, like.stride()

    def take(self) -> Tensor:
        """The tensor ``[*shape]``, on the device again; may be called more than once."""
        return self._device.bring(self._home, self.shape, self._stride)
