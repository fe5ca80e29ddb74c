"""Pairs of points: the ways between them, and the sums of forces on each point."""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-6  #: In Å²; keeps directions finite for two points at the same position


class PointPairs:
    """Pairs ``[P]`` of int64 numbers of points between which forces act, among ``points`` in all."""

    def __init__(self, first: Tensor, second: Tensor, points: int) -> None:
        self.first, self.second, self._points = first, second, points
        ends = torch.cat([first, second])
        # Each point adds its pairs in the order of their numbers, so that a sum always has the same bits.
        order = ends.sort(stable=True).indices
        counts = torch.bincount(ends, minlength=points)
        self._pair = (order % max(1, len(first))).int()
        self._sign = torch.where(order < len(first), 1.0, -1.0)
        self._begin = (counts.cumsum(0) - counts).int()

    def repeated(self, copies: int) -> PointPairs:
        """Return the same pairs of each of ``copies`` sets of points, whose points are numbered one after the other."""
        start = self._points * torch.arange(copies, device=self.first.device)[:, None]
        first, second = ((start + ends).flatten() for ends in (self.first, self.second))
        return PointPairs(first, second, copies * self._points)

    def offsets(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the way ``[P, 3]`` from second to first ``points [N, 3]`` in Å, and its length ``[P]``, never zero."""
        rows = _wide_rows(points)
        wide = _selected(rows, self.first) - _selected(rows, self.second)
        x, y, z, *_ = wide.square().unbind(-1)  # a sum over so few elements is slow
        return wide[:, :3], (x + y + z + _EPSILON).sqrt()

    def forces(self, pull: Tensor, offset: Tensor) -> Tensor:
        """Return the sum ``[N, 3]`` of ``pull [P]`` times ``offset [P, 3]``, negative for second points."""
        return torch.nn.functional.embedding_bag(
            self._pair,
            pull[:, None] * offset,
            self._begin,
            mode="sum",
            per_sample_weights=self._sign.to(offset),
        )


def _wide_rows(points: Tensor) -> Tensor:
    """Return points as numbers of 16 bytes ``[N]``, which are selected faster than rows; float64 stays ``[N, 3]``."""
    if points.dtype != torch.float32:
        return points
    return torch.nn.functional.pad(points, (0, 1)).view(torch.complex128).squeeze(-1)


def _selected(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return some of :func:`_wide_rows`, ``[P, 3]`` or wider."""
    found = rows.index_select(0, numbers)
    return found.view(torch.float32).unflatten(0, (-1, 4)) if found.is_complex() else found
