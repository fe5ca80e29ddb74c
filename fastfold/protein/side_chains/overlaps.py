"""Energies of candidates with the atoms of other residues, and with the candidates of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.candidates import RotamerCandidates
from fastfold.protein.side_chains.clashes import (
    CONTACT_REACH,
    contact_points,
    overlap_energies,
    overlaps,
)

_C, _N, _CB = (rc.atom_order[name] for name in ("C", "N", "CB"))


def with_fixed_atoms(
    candidates: Sequence[RotamerCandidates],
    xyz: np.ndarray,
    known: np.ndarray,
    aatype: np.ndarray,
    tied: np.ndarray,
    max_energy: float,
) -> list[RotamerCandidates]:
    """Add the energies with atoms of other residues that stay, and leave out candidates that overlap with them.

    Args:
        candidates: One for each residue with missing atoms.
        xyz: Positions ``[N, 37, 3]`` in Å.
        known: ``[N, 37]``, True for atoms that stay.
        aatype: ``[N]`` residue types.
        tied: ``[N]``, True for residues bonded to their predecessor.
        max_energy: Energy above a residue's best candidate from which others are left out.
    """
    points, kinds, residues, slots = _fixed_points(xyz, known, aatype)
    ends = np.append(tied[1:], False)
    better = []
    for one in candidates:
        i, center = one.residue, xyz[one.residue, _CB]
        near = np.linalg.norm(points - center, axis=-1) < _reach(one, center) + CONTACT_REACH
        # Rotamers are fitted with the residue's own backbone and with the atoms next to it.
        near &= residues != i
        if tied[i]:
            near &= ~((residues == i - 1) & (slots == _C))
        if ends[i]:
            near &= ~((residues == i + 1) & (slots == _N))
        energies = (
            one.energies + overlap_energies(one.points, one.kinds, points[near][None], kinds[near])[:, 0]
        )
        better.append(one.select(np.flatnonzero(energies <= energies.min() + max_energy), energies))
    return better


def _fixed_points(
    xyz: np.ndarray, known: np.ndarray, aatype: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return positions ``[Q, 3]`` of known atoms and whole rings, their kinds, residues, and slots (-1 for rings)."""
    points, kinds, residues, slots = [], [], [], []
    for i in np.flatnonzero(known.any(-1)).tolist():
        present = np.flatnonzero(known[i]).tolist()
        atoms, of_atoms = contact_points(int(aatype[i]), present, xyz[i, present][None], {})
        points.append(atoms[0])
        kinds.append(of_atoms)
        residues.append(np.full(len(of_atoms), i))
        slots.append(np.array(present + [-1] * (len(of_atoms) - len(present))))
    if not points:
        return np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int), np.zeros(0, int)
    return np.concatenate(points), np.concatenate(kinds), np.concatenate(residues), np.concatenate(slots)


def pair_energies(
    candidates: Sequence[RotamerCandidates], xyz: np.ndarray
) -> dict[tuple[int, int], np.ndarray]:
    """Return energies ``[K, L]`` between candidates of two residues, by their places, where they are not all 0.

    CB atoms are those of ``xyz [N, 37, 3]`` in Å.
    """
    centers = np.array([xyz[one.residue, _CB] for one in candidates]).reshape(-1, 3)
    reach = np.array([_reach(one, center) for one, center in zip(candidates, centers, strict=True)])
    points = [_FlatPoints.of(one) for one in candidates]
    pairs = {}
    for i, one in enumerate(candidates):
        distance = np.linalg.norm(centers[i + 1 :] - centers[i], axis=-1)
        near = (np.flatnonzero(distance < reach[i] + reach[i + 1 :] + CONTACT_REACH) + i + 1).tolist()
        if not near:
            continue
        ends = np.cumsum([0, *(len(candidates[j].energies) for j in near)])
        others = _FlatPoints.joined([points[j] for j in near], ends[:-1])
        others = others.within(reach[i] + CONTACT_REACH, centers[i])
        rows, columns, energies = overlaps(points[i].points, points[i].kinds, others.points, others.kinds)
        place = points[i].candidate[rows] * ends[-1] + others.candidate[columns]
        table = np.bincount(place, energies, len(one.energies) * ends[-1]).reshape(-1, ends[-1])
        for j, begin, end in zip(near, ends[:-1], ends[1:], strict=True):
            if table[:, begin:end].any():
                pairs[i, j] = table[:, begin:end].copy()
    return pairs


class _FlatPoints(NamedTuple):
    """Points of candidates in a row, so that those of many residues are compared at a time."""

    points: np.ndarray  #: ``[P, 3]`` in Å
    kinds: np.ndarray  #: ``[P]``
    candidate: np.ndarray  #: ``[P]``, number of the point's candidate

    @classmethod
    def of(cls, one: RotamerCandidates) -> _FlatPoints:
        count, size = one.points.shape[:2]
        return cls(one.points.reshape(-1, 3), np.tile(one.kinds, count), np.repeat(np.arange(count), size))

    @classmethod
    def joined(cls, parts: Sequence[_FlatPoints], first: np.ndarray) -> _FlatPoints:
        """Join the points of residues, whose candidates are numbered from ``first`` on."""
        numbers = [part.candidate + number for part, number in zip(parts, first, strict=True)]
        points, kinds, _ = zip(*parts, strict=True)
        return cls(np.concatenate(points), np.concatenate(kinds), np.concatenate(numbers))

    def within(self, distance: float, center: np.ndarray) -> _FlatPoints:
        near = np.square(self.points - center).sum(-1) < distance**2
        return _FlatPoints(self.points[near], self.kinds[near], self.candidate[near])


def _reach(one: RotamerCandidates, center: np.ndarray) -> float:
    return float(np.linalg.norm(one.points - center, axis=-1).max())
