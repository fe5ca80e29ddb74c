"""Dihedral angles, frames and backbone torsions of atoms in the atom37 layout, with NumPy."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc

_N, _CA, _C = (rc.atom_order[name] for name in ("N", "CA", "C"))
MAX_PEPTIDE_BOND = 2.5
"""Distance in Å of C and N above which no bond joins two residues: a bond has 1.33, atoms in contact about 3."""
_MAX_ALPHA_DISTANCE = 4.6
"""The same limit for alpha carbons, if C or N is missing; across a peptide bond they are 3.8 apart."""


def dihedrals(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Return the torsion angles ``[...]`` of four points ``[..., 3]`` each, in degrees from -180 to 180."""
    axis = c - b
    first, second = np.cross(b - a, axis), np.cross(axis, d - c)
    sine = (np.cross(first, second) * axis).sum(-1) / np.maximum(np.linalg.norm(axis, axis=-1), 1e-9)
    return np.asarray(np.degrees(np.arctan2(sine, (first * second).sum(-1))))


def angles(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the angles ``[...]`` at ``b`` between three points ``[..., 3]`` each, in degrees."""
    first, second = a - b, c - b
    sine = np.linalg.norm(np.cross(first, second), axis=-1)
    return np.asarray(np.degrees(np.arctan2(sine, (first * second).sum(-1))))


def angle_difference(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """Return the difference of angles in degrees, from -180 to 180."""
    return (a - b + 180.0) % 360.0 - 180.0


def follows(chain_index: np.ndarray, residue_index: np.ndarray) -> np.ndarray:
    """Return a mask ``[N]`` of residues with the next number after their predecessor, in the same chain."""
    return np.concatenate([[False], (np.diff(chain_index) == 0) & (np.diff(residue_index) == 1)])


def without_bond(positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a mask ``[N - 1]`` of residues without a peptide bond to the next one.

    The distance of C and N decides, or of the alpha carbons if one of them is missing. Without these, residues count as
    bonded.

    Args:
        positions: Atom37 positions ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
    """
    present = np.asarray(mask) > 0.5
    far = np.zeros(max(len(present) - 1, 0), bool)
    for before, after, limit in ((_CA, _CA, _MAX_ALPHA_DISTANCE), (_C, _N, MAX_PEPTIDE_BOND)):
        known = present[:-1, before] & present[1:, after]
        apart = np.asarray(positions[1:, after] - positions[:-1, before], np.float64)
        far = np.where(known, np.linalg.norm(apart, axis=-1) > limit, far)
    return far


def backbone_torsions(positions: np.ndarray, mask: np.ndarray, tied: np.ndarray) -> np.ndarray:
    """Return phi and psi ``[N, 2]`` in degrees, NaN where undefined.

    Arguments are atom37 positions ``[N, 37, 3]``, their mask ``[N, 37]``, and the residues bonded to their predecessor
    ``[N]``.
    """
    xyz, present = np.asarray(positions, np.float64), np.asarray(mask) > 0.5
    torsions = np.full((len(xyz), 2), np.nan)
    whole = np.asarray(present[:, [_N, _CA, _C]].all(-1))
    after = np.flatnonzero(tied)
    phi = after[present[after - 1, _C] & whole[after]]
    torsions[phi, 0] = dihedrals(xyz[phi - 1, _C], xyz[phi, _N], xyz[phi, _CA], xyz[phi, _C])
    psi = after[whole[after - 1] & present[after, _N]] - 1
    torsions[psi, 1] = dihedrals(xyz[psi, _N], xyz[psi, _CA], xyz[psi, _C], xyz[psi + 1, _N])
    return torsions


def axis_frames(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rotations ``[..., 3, 3]`` and origins ``c [..., 3]`` of frames with x from ``b`` to ``c``.

    The third point ``a`` is in the x-y plane, at positive y. Columns of the rotation are the axes; if the points are
    collinear, the y and z axes are zero.
    """
    x = unit_vectors(c - b)
    y = a - b
    y = unit_vectors(y - (y * x).sum(-1, keepdims=True) * x)
    return np.stack([x, y, np.cross(x, y)], -1), c


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return ``vectors [..., 3]`` with length 1; those shorter than 1e-9 stay nearly zero."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9))
