"""Capacity for offloaded tensors, first in the host's memory, then on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_STEPS = 8  #: Steps in which a tensor is offloaded, unless the capacity is smaller


@dataclass(frozen=True)
class Away:
    """Number of offloaded rows of a tensor, of all its rows, and their bytes."""

    rows: int
    of: int
    nbytes: int

    @property
    def kept(self) -> float:
        """Share of the rows that stay on the device."""
        return 1.0 - self.share

    @property
    def share(self) -> float:
        """Share of the rows that are offloaded."""
        return self.rows / self.of if self.of else 0.0


@dataclass(frozen=True)
class OffloadRoom:
    """Bytes for offloaded tensors in the host's memory, and on a disk, used when that is full."""

    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Total number of bytes."""
        return self.host + self.disk

    def choices(self, rows: int, row_bytes: int, *, taken: int = 0) -> Iterator[Away]:
        """Yield possible offloaded shares of a tensor's rows, from nothing up to all or the capacity.

        ``taken`` are bytes of the capacity that are in use meanwhile.
        """
        most = [max(0, room - taken) // max(1, row_bytes) for room in (self.host, self.total)]
        counts = {rows * step // _STEPS for step in range(_STEPS + 1)} | {min(rows, room) for room in most}
        for count in sorted(counts):
            if count <= most[1]:
                yield Away(count, rows, count * row_bytes)

    def split(self, nbytes: int, piece: int = 0) -> tuple[int, int]:
        """Split a number of bytes between the host's memory and the disk.

        ``piece`` bytes must be contiguous; the last piece on the host may have to go to the disk whole.
        """
        host = min(nbytes, self.host)
        disk = nbytes - host
        return host, min(nbytes, disk + piece) if disk else 0
