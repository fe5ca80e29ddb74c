"""Room for what leaves the device: in the host's memory first, then on a disk; and how much of a tensor goes there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_STEPS = 8
"""A tensor stays on the device in eighths, or as far as there is no room for it elsewhere."""


@dataclass(frozen=True)
class Away:
    """A share of a tensor's rows that waits elsewhere.

    Attributes:
        rows: How many wait.
        of: How many there are.
        nbytes: Bytes of those that wait.
    """

    rows: int
    of: int
    nbytes: int

    @property
    def kept(self) -> float:
        """Share of the rows that stay on the device."""
        return 1.0 - self.share

    @property
    def share(self) -> float:
        """Share of the rows that wait."""
        return self.rows / self.of if self.of else 0.0


@dataclass(frozen=True)
class OffloadRoom:
    """Bytes for what leaves the device.

    Attributes:
        host: Of the host's memory.
        disk: Of a disk, used when the host's memory is full.
    """

    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.host + self.disk

    def choices(self, rows: int, row_bytes: int, *, taken: int = 0) -> Iterator[Away]:
        """How much of a tensor may wait: nothing, then in steps up to all of it, or as much as there is room for.

        Args:
            rows: Of the tensor.
            row_bytes: Of each.
            taken: Bytes of the room that are in use meanwhile.
        """
        most = [max(0, room - taken) // max(1, row_bytes) for room in (self.host, self.total)]
        counts = {rows * step // _STEPS for step in range(_STEPS + 1)} | {min(rows, room) for room in most}
        for count in sorted(counts):
            if count <= most[1]:
                yield Away(count, rows, count * row_bytes)

    def split(self, nbytes: int, piece: int = 0) -> tuple[int, int]:
        """Bytes of the host's memory and of the disk that a number of bytes takes.

        Args:
            nbytes: Bytes that wait.
            piece: Bytes that lie together: of the last one on the host all may have to go to the disk.
        """
        host = min(nbytes, self.host)
        disk = nbytes - host
        return host, min(nbytes, disk + piece) if disk else 0
