"""Host memory that is divided into parts with separate lifetimes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


class Region:
    """Block of host memory, a flat tensor of bytes, whose parts are used independently."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        # First and last byte of each part, with a reference to its tensor.
        self._parts: list[tuple[int, int, TensorWeakRef]] = []

    def used(self) -> list[tuple[int, int]]:
        """Return the parts that are in use, in order."""
        self._parts = [part for part in self._parts if part[2]() is not None]
        return sorted((start, stop) for start, stop, _ in self._parts)

    def gap(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        """Return size and start of the smallest sufficient free part; None if there is none."""
        found, free = [], 0
        for start, stop in [*self.used(), (self.memory.nbytes, self.memory.nbytes)]:
            if start - free >= nbytes:
                found.append((start - free, free))
            free = -(-stop // alignment) * alignment
        return min(found, default=None)

    def hand_out(self, start: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return flat memory from byte ``start`` on, in use while the returned tensor lives."""
        stop = start + elements * dtype.itemsize
        part = self.memory[start:stop].view(dtype)
        self._parts.append((start, stop, TensorWeakRef(part)))
        return part


def smallest_gap(regions: Iterable[Region], nbytes: int, alignment: int) -> tuple[Region, int] | None:
    """Return region and start of the smallest sufficient free part; None if there is none."""
    gaps = [(gap, region) for region in regions if (gap := region.gap(nbytes, alignment)) is not None]
    if not gaps:
        return None
    (_, start), region = min(gaps, key=lambda found: found[0])
    return region, start
