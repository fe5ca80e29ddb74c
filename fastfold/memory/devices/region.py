"""Memory that is kept while its parts come and go."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor


class Region:
    """Memory of the host, parts of which are in use.

    Args:
        memory: Bytes.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        # First and last byte of each part, with what was handed out of it.
        self._parts: list[tuple[int, int, weakref.ref[Tensor]]] = []

    def used(self) -> list[tuple[int, int]]:
        """Parts that somebody holds, in order."""
        self._parts = [part for part in self._parts if part[2]() is not None]
        return sorted((start, stop) for start, stop, _ in self._parts)

    def gap(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        """Size and beginning of the smallest free part that has room; None if there is none."""
        found, free = [], 0
        for start, stop in [*self.used(), (self.memory.nbytes, self.memory.nbytes)]:
            if start - free >= nbytes:
                found.append((start - free, free))
            free = -(-stop // alignment) * alignment
        return min(found, default=None)

    def hand_out(self, start: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Flat memory from byte ``start`` on; in use as long as somebody holds what is returned."""
        stop = start + elements * dtype.itemsize
        part = self.memory[start:stop].view(dtype)
        self._parts.append((start, stop, weakref.ref(part)))
        return part


def smallest_gap(regions: Iterable[Region], nbytes: int, alignment: int) -> tuple[Region, int] | None:
    """The region and the beginning of the smallest free part that has room; None if there is none."""
    gaps = [(gap, region) for region in regions if (gap := region.gap(nbytes, alignment)) is not None]
    if not gaps:
        return None
    (_, start), region = min(gaps, key=lambda found: found[0])
    return region, start
