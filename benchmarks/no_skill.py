"""Baseline structures and distograms, equal for every protein of a length.

lDDT-CA counts many distances along the chain, and helices pack like proteins do. So a structure that knows nothing of
its protein scores 0.4 in short chains and 0.25 in long ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

RISE, TURN, RADIUS = 1.5, np.deg2rad(100.0), 2.3
"""Geometry of an alpha helix: Å along the axis and angle per residue, and the distance of CA from the axis in Å."""

_HELIX, _SPACING, _PER_ROW = 18, 10.0, 3
_MAX_SEPARATION = 255


def straight_helix(length: int) -> np.ndarray:
    """Return one straight alpha helix, CA positions ``[N, 3]`` in Å."""
    at = np.arange(length)
    return _on_axis(RISE * at, TURN * at)


def helix_bundle(length: int) -> np.ndarray:
    """Return straight antiparallel alpha helices on a square grid, CA positions ``[N, 3]`` in Å.

    Each has 18 residues, neighbours are 10 Å apart, and a row has three. No loops connect them.
    """
    helix, place = np.divmod(np.arange(length), _HELIX)
    up = np.where(helix % 2 == 0, 1.0, -1.0)
    # A downward helix turns the other way round, or it would be left-handed.
    points = _on_axis(RISE * np.where(up > 0, place, _HELIX - 1 - place), up * TURN * np.arange(length))
    points[:, 0] += _SPACING * (helix % _PER_ROW)
    points[:, 1] += _SPACING * (helix // _PER_ROW)
    return points


def _on_axis(height: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Return points around the z axis, ``[N, 3]`` float32."""
    return np.stack([RADIUS * np.cos(angle), RADIUS * np.sin(angle), height], -1).astype(np.float32)


@dataclass(frozen=True, eq=False)
class SeparationPrior:
    """Distogram that depends on the separation only: the baseline of a network without other knowledge."""

    log_probabilities: np.ndarray  #: ``[256, bins]`` by separation; the last row is for 255 and more
    edges: np.ndarray  #: ``[bins - 1]`` in Å

    @classmethod
    def from_structures(
        cls, structures: Iterable[tuple[np.ndarray, np.ndarray]], edges: np.ndarray
    ) -> SeparationPrior:
        """Count distances in structures by separation and bin, with one pseudocount each.

        Structures and edges are those of :func:`fastfold.protein.metrics.contacts.score_distogram`.
        """
        bins = len(edges) + 1
        counts = np.ones((_MAX_SEPARATION + 1) * bins)
        for beta, mask in structures:
            i, j = np.triu_indices(len(mask))
            kept = (np.asarray(mask)[i] > 0.5) & (np.asarray(mask)[j] > 0.5)
            i, j = i[kept], j[kept]
            distances = np.sqrt(np.square(beta[i] - beta[j]).sum(-1))
            # An edge belongs to the bin below it, as in the loss.
            cells = np.minimum(j - i, _MAX_SEPARATION) * bins + np.searchsorted(edges, distances)
            counts += np.bincount(cells, minlength=len(counts))
        table = counts.reshape(-1, bins)
        return cls(np.log(table / table.sum(-1, keepdims=True)).astype(np.float32), np.asarray(edges))

    def logits(self, length: int) -> np.ndarray:
        """Return log-probabilities ``[N, N, bins]`` for a chain of ``length`` residues."""
        at = np.arange(length)
        return self.log_probabilities[np.minimum(np.abs(at[:, None] - at), _MAX_SEPARATION)]
