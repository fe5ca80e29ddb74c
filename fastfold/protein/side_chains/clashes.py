"""Energy of overlaps between atoms, for the choice among rotamers."""

from __future__ import annotations

from functools import cache

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.rings import ring_slots

RADII = {"C": 1.6, "N": 1.3, "O": 1.3, "S": 1.7}
"""Radii in Å at whose sum two atoms begin to overlap; polar ones are small, because they form hydrogen bonds."""
_RING_RADIUS = 1.4  #: Radius in Å of a ring's centre, which keeps bonds from passing through the ring
_SLOPE = 35.0  #: Energy of an overlap, relative to the sum of radii; a rotamer's energy has the same unit
_KINDS = ("C", "N", "O", "S", "ring")
_RING = _KINDS.index("ring")


@cache
def _contact_distances() -> np.ndarray:
    radii = np.array([RADII.get(kind, _RING_RADIUS) for kind in _KINDS])
    distances = radii[:, None] + radii
    distances[_RING, _RING] = 1e-3  # the rings' atoms suffice
    return distances.astype(np.float32)


_KIND_OF_SLOT = np.array([_KINDS.index(name[0]) for name in rc.atom_types])


def contact_points(
    aatype: int, slots: list[int], atoms: np.ndarray, others: dict[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the points ``[K, P, 3]`` that can overlap, and their kinds ``[P]``: atoms, and centres of rings.

    ``atoms [K, M, 3]`` has the positions of a residue's ``slots`` in ``K`` rotamers, ``others`` those of its further
    atoms by slot, ``[3]`` or ``[K, 3]``. A ring counts if one of its atoms is in ``slots``.
    """
    points, kinds = [atoms], [_KIND_OF_SLOT[slots]]
    for ring in ring_slots(aatype):
        if set(ring) & set(slots) and set(ring) <= {*slots, *others}:
            shape = atoms[:, 0].shape
            corners = [
                atoms[:, slots.index(s)] if s in slots else np.broadcast_to(others[s], shape) for s in ring
            ]
            points.append(np.mean(corners, 0)[:, None])
            kinds.append(np.array([_RING]))
    return np.concatenate(points, 1), np.concatenate(kinds)


CONTACT_REACH = float(_contact_distances().max())  #: Largest distance in Å at which two points overlap


def overlap_energies(
    points: np.ndarray, kinds: np.ndarray, others: np.ndarray, other_kinds: np.ndarray
) -> np.ndarray:
    """Return energies ``[K, L]`` of the overlaps between ``K`` rotamers of a residue and ``L`` of another.

    Args:
        points: Positions ``[K, P, 3]`` in Å.
        kinds: ``[P]``, of :func:`contact_points`.
        others: Positions ``[L, Q, 3]`` in Å.
        other_kinds: ``[Q]``.
    """
    (count, size), (other_count, other_size) = points.shape[:2], others.shape[:2]
    rows, columns, energies = overlaps(
        points.reshape(-1, 3), np.tile(kinds, count), others.reshape(-1, 3), np.tile(other_kinds, other_count)
    )
    pairs = (rows // size) * other_count + columns // other_size
    return np.bincount(pairs, energies, count * other_count).reshape(count, other_count)


def overlaps(
    points: np.ndarray, kinds: np.ndarray, others: np.ndarray, other_kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return near pairs of ``points [P, 3]`` and ``others [Q, 3]`` in Å: indices of both ``[R]``, energies ``[R]``."""
    a, b = ((x - points[0]).astype(np.float32) for x in (points, others))
    squares = np.square(a).sum(-1)[:, None] + np.square(b).sum(-1)
    squares -= (2.0 * a) @ b.T
    near = np.flatnonzero(squares < CONTACT_REACH**2)  # faster than numbers of rows and columns
    rows, columns = np.divmod(near, max(1, len(b)))
    contact = _contact_distances()[kinds[rows], other_kinds[columns]]
    distance = np.sqrt(np.maximum(squares.reshape(-1)[near], 0.0))
    return rows, columns, _SLOPE * np.maximum(1.0 - distance / contact, 0.0)
