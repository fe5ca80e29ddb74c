"""Geometry that violations of AlphaFold do not cover: twisted peptide bonds and long backbone bonds."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein

MAX_TWIST = 45.0
"""Degrees between omega and the nearer of cis and trans."""
_MAX_STRETCH = 0.2
"""Å that a backbone bond may be off its length."""
_BACKBONE_BONDS = (("N", "CA", 1.458), ("CA", "C", 1.525), ("C", "O", 1.231))
"""Bonds within a residue and their lengths in Å."""
_PEPTIDE_BOND = 1.33


def twisted_residues(protein: Protein) -> np.ndarray:
    """Return whether each residue ends a peptide bond with omega far from cis and trans, ``[N]`` bool."""
    before, after = _bonded(protein)
    atoms = [(before, "CA"), (before, "C"), (after, "N"), (after, "CA")]
    places = [(rows, rc.atom_order[name]) for rows, name in atoms]
    known = np.all([protein.atom_mask[place] > 0.5 for place in places], axis=0)
    omega = dihedrals(*(protein.atom_positions[place].astype(np.float64) for place in places))
    off_planar = np.minimum(np.abs(omega), 180.0 - np.abs(omega))
    return _both_ends(before, after, known & (off_planar > MAX_TWIST), len(protein))


def stretched_residues(protein: Protein) -> np.ndarray:
    """Return whether each residue has a backbone bond that is not of its length, ``[N]`` bool."""
    every = np.arange(len(protein))
    found = np.zeros(len(protein), bool)
    bonds = [(every, first, every, second, length) for first, second, length in _BACKBONE_BONDS]
    before, after = _bonded(protein)
    for rows, first, others, second, length in [*bonds, (before, "C", after, "N", _PEPTIDE_BOND)]:
        a, b = (rows, rc.atom_order[first]), (others, rc.atom_order[second])
        known = (protein.atom_mask[a] > 0.5) & (protein.atom_mask[b] > 0.5)
        distance = np.linalg.norm(protein.atom_positions[a] - protein.atom_positions[b], axis=-1)
        found |= _both_ends(rows, others, known & (np.abs(distance - length) > _MAX_STRETCH), len(protein))
    return found


def dihedrals(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Return the torsion angles ``[...]`` of four points ``[..., 3]`` each, in degrees from -180 to 180."""
    axis = c - b
    first, second = np.cross(b - a, axis), np.cross(axis, d - c)
    sine = (np.cross(first, second) * axis).sum(-1) / np.maximum(np.linalg.norm(axis, axis=-1), 1e-9)
    return np.asarray(np.degrees(np.arctan2(sine, (first * second).sum(-1))))


def _bonded(protein: Protein) -> tuple[np.ndarray, np.ndarray]:
    """Return the residues of each pair that is bonded by its numbers."""
    tied = (np.diff(protein.chain_index) == 0) & (np.diff(protein.residue_index) == 1)
    before = np.flatnonzero(tied)
    return before, before + 1


def _both_ends(before: np.ndarray, after: np.ndarray, chosen: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count, bool)
    found[before[chosen]] = found[after[chosen]] = True
    return found
