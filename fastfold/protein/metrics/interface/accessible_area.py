"""Solvent-accessible area of atoms (Shrake & Rupley 1973)."""

from __future__ import annotations

from functools import cache

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.dot_surface import sphere_points, touches

WATER = 1.4  #: Radius of the probe in Å

_POINTS = 200  #: Points on each atom's sphere
_TRIGONAL = {
    "ASN": ("CG",), "ASP": ("CG",), "GLN": ("CD",), "GLU": ("CD",), "ARG": ("CZ",), "HIS": ("CG",), "PHE": ("CG",),
    "TYR": ("CG", "CZ"), "TRP": ("CG", "CD2", "CE2"),
}  # fmt: skip
_AROMATIC = {
    "PHE": ("CD1", "CD2", "CE1", "CE2", "CZ"), "TYR": ("CD1", "CD2", "CE1", "CE2"), "HIS": ("CD2", "CE1"),
    "TRP": ("CD1", "CE3", "CZ2", "CZ3", "CH2"),
}  # fmt: skip


@cache
def protor_radii() -> np.ndarray:
    """Return radii in Å of atoms with their hydrogens by residue type, ``[21, 37]`` (Tsai et al. 1999)."""
    radii = np.zeros((len(rc.restypes) + 1, rc.atom_type_num))
    by_element = {"C": 1.88, "N": 1.64, "O": 1.42, "S": 1.77}
    for name, slot in rc.atom_order.items():
        radii[:, slot] = by_element[name[0]]
    radii[:, rc.atom_order["C"]] = 1.61
    for letter, aatype in rc.restype_order.items():
        residue = rc.restype_1to3[letter]
        for name in _TRIGONAL.get(residue, ()):
            radii[aatype, rc.atom_order[name]] = 1.61
        for name in _AROMATIC.get(residue, ()):
            radii[aatype, rc.atom_order[name]] = 1.76
    for letter, name in (("S", "OG"), ("T", "OG1"), ("Y", "OH")):
        radii[rc.restype_order[letter], rc.atom_order[name]] = 1.46
    return radii


def accessible_area(
    positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, *, probe: float = WATER
) -> np.ndarray:
    """Return the area in Å² of each atom that the centre of a probe can reach, ``[N, 37]``.

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: Residue types ``[N]``, 0 to 20.
        probe: Radius of the probe in Å.
    """
    residue, slot = np.nonzero(mask > 0.5)
    atoms = positions[residue, slot].astype(np.float64)
    grown = protor_radii()[aatype[residue], slot] + probe
    sphere = sphere_points(_POINTS)
    area = np.zeros(mask.shape)
    for i in range(len(atoms)):
        apart = np.linalg.norm(atoms - atoms[i], axis=-1)
        others = (apart < grown + grown[i]) & (apart > 0)
        free = ~touches(atoms[i] + grown[i] * sphere, atoms[others], grown[others])
        area[residue[i], slot[i]] = 4.0 * np.pi * grown[i] ** 2 * free.mean()
    return area
