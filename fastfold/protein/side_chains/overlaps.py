"""Energies of candidates with the atoms of other residues, and with the candidates of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.candidates import Candidates
from fastfold.protein.side_chains.clashes import CONTACT_REACH, contact_points, overlap_energies

_C, _N, _CB = (rc.atom_order[name] for name in ("C", "N", "CB"))


def with_fixed_atoms(
    candidates: Sequence[Candidates],
    xyz: np.ndarray,
    known: np.ndarray,
    aatype: np.ndarray,
    tied: np.ndarray,
    max_energy: float,
) -> list[Candidates]:
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
        i, centre = one.residue, xyz[one.residue, _CB]
        near = np.linalg.norm(points - centre, axis=-1) < _reach(one, centre) + CONTACT_REACH
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


def pair_energies(candidates: Sequence[Candidates], xyz: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """Return energies ``[K, L]`` between candidates of two residues, by their places, where they are not all 0.

    CB atoms are those of ``xyz [N, 37, 3]`` in Å.
    """
    centres = np.array([xyz[one.residue, _CB] for one in candidates]).reshape(-1, 3)
    reach = np.array([_reach(one, centre) for one, centre in zip(candidates, centres, strict=True)])
    pairs = {}
    for i, one in enumerate(candidates):
        distance = np.linalg.norm(centres[i + 1 :] - centres[i], axis=-1)
        for j in (np.flatnonzero(distance < reach[i] + reach[i + 1 :] + CONTACT_REACH) + i + 1).tolist():
            energies = overlap_energies(one.points, one.kinds, candidates[j].points, candidates[j].kinds)
            if energies.any():
                pairs[i, j] = energies
    return pairs


def _reach(one: Candidates, centre: np.ndarray) -> float:
    return float(np.linalg.norm(one.points - centre, axis=-1).max())
