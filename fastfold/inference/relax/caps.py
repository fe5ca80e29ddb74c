"""Caps of residues without neighbours: acetyl before and methylamide after, as the next residues' backbones begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import axis_frames, dihedrals

CAPS = (_ACETYL, _METHYLAMIDE) = "ACE", "NME"  #: Residue names of the force field
_N, _CA, _C, _O = (rc.atom_order[name] for name in ("N", "CA", "C", "O"))
_PEPTIDE, _CARBONYL, _TO_METHYL, _TO_ALPHA = 1.33, 1.23, 1.52, 1.45
"""Lengths in Å of the bonds C-N, C-O, C-CH3 of acetyl, and N-CH3 of methylamide."""
_AT_N, _AT_C, _AT_OXYGEN = 121.7, 116.2, 123.0
"""Angles in degrees of C-N-CA, CA-C-N and O-C-N in a peptide."""
#: Tried torsions in degrees of acetyl's carbon, which nothing else decides
_PHI = np.arange(-180.0, 180.0, 15.0)


@dataclass(frozen=True)
class Cap:
    """Heavy atoms of a cap, a residue of the force field."""

    residue: str  #: One of :data:`CAPS`
    atoms: dict[str, np.ndarray]  #: Positions ``[3]`` in Å by name


def acetyl(residue: np.ndarray, others: np.ndarray) -> Cap:
    """Return the cap before a residue with atom37 positions ``[37, 3]`` in Å, as far as can be from ``others [A, 3]``.

    N, CA and C of the residue are known.
    """
    n, ca, c = residue[[_N, _CA, _C]]
    best, room = {}, -np.inf
    for phi in _PHI.tolist():
        carbon = _bonded(c, ca, n, _PEPTIDE, _AT_N, phi)
        atoms = {
            "CH3": _bonded(ca, n, carbon, _TO_METHYL, _AT_C, 180.0),
            "C": carbon,
            "O": _bonded(ca, n, carbon, _CARBONYL, _AT_OXYGEN, 0.0),
        }
        points = np.array(list(atoms.values()))
        distance = np.linalg.norm(points[:, None] - others, axis=-1).min(initial=np.inf)
        if distance > room:
            best, room = atoms, distance
    return Cap(_ACETYL, best)


def methylamide(residue: np.ndarray) -> Cap:
    """Return the cap after a residue with atom37 positions ``[37, 3]`` in Å, opposite to its O."""
    n, ca, c, o = residue[[_N, _CA, _C, _O]]
    psi = float(dihedrals(n, ca, c, o)) + 180.0
    nitrogen = _bonded(n, ca, c, _PEPTIDE, _AT_C, psi)
    return Cap(_METHYLAMIDE, {"N": nitrogen, "C": _bonded(ca, c, nitrogen, _TO_ALPHA, _AT_N, 180.0)})


def _bonded(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, length: float, angle: float, torsion: float
) -> np.ndarray:
    """Return the point at a bond's length in Å from ``c``, an angle to ``b`` and a torsion to ``a``, in degrees."""
    rotation, origin = axis_frames(a, b, c)
    bend, turn = np.radians(angle), np.radians(torsion)
    local = [-np.cos(bend), np.sin(bend) * np.cos(turn), np.sin(bend) * np.sin(turn)]
    return np.asarray(origin + length * (rotation @ local))
