"""Hydrogen bonds between heavy atoms, whose hydrogens a prediction lacks."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc

MAX_DISTANCE, MIN_ANGLE = 3.5, 90.0
"""Longest distance of donor and acceptor in Å, and smallest angle at both toward an atom bonded to it in degrees.

Criteria for heavy atoms after Baker & Hubbard 1984 (Prog. Biophys. Mol. Biol. 44, 97) and McDonald & Thornton 1994
(J. Mol. Biol. 238, 777).
"""

_DONORS = {
    "ARG": ("NE", "NH1", "NH2"), "ASN": ("ND2",), "GLN": ("NE2",), "HIS": ("ND1", "NE2"), "LYS": ("NZ",),
    "SER": ("OG",), "THR": ("OG1",), "TRP": ("NE1",), "TYR": ("OH",),
}  # fmt: skip
_ACCEPTORS = {
    "ASN": ("OD1",), "ASP": ("OD1", "OD2"), "GLN": ("OE1",), "GLU": ("OE1", "OE2"), "HIS": ("ND1", "NE2"),
    "SER": ("OG",), "THR": ("OG1",), "TYR": ("OH",),
}  # fmt: skip
_BONDED = 1.7  #: Longest bond of heavy atoms but sulphur in Å


def polar_atoms(aatype: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which atoms give and which take hydrogen bonds, two ``[N, 37]`` bool."""
    gives, takes = (np.zeros((len(aatype), rc.atom_type_num), bool) for _ in range(2))
    gives[:, rc.atom_order["N"]] = aatype != rc.restype_order["P"]
    takes[:, [rc.atom_order["O"], rc.atom_order["OXT"]]] = True
    for letter, number in rc.restype_order.items():
        for table, polar in ((_DONORS, gives), (_ACCEPTORS, takes)):
            slots = [rc.atom_order[name] for name in table.get(rc.restype_1to3[letter], ())]
            polar[np.ix_(aatype == number, slots)] = True
    return gives, takes


def hydrogen_bonds(positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray) -> np.ndarray:
    """Return hydrogen bonds ``[B, 4]``: residue and atom slot of the donor, then those of the acceptor.

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: Residue types ``[N]``, 0 to 20.
    """
    present = mask > 0.5
    gives, takes = polar_atoms(aatype)
    donor, acceptor = np.argwhere(gives & present), np.argwhere(takes & present)
    atoms = positions.astype(np.float64)
    first, second = atoms[tuple(donor.T)], atoms[tuple(acceptor.T)]
    apart = np.linalg.norm(first[:, None] - second, axis=-1)
    same = donor[:, :1] == acceptor[:, 0]
    i, j = np.nonzero((apart < MAX_DISTANCE) & (apart > 0) & ~same)
    bonds = np.concatenate([donor[i], acceptor[j]], -1)
    kept = [
        _points(atoms, present, bond[:2], bond[2:]) and _points(atoms, present, bond[2:], bond[:2])
        for bond in bonds
    ]
    return bonds[np.array(kept, bool)]


def _points(atoms: np.ndarray, present: np.ndarray, own: np.ndarray, other: np.ndarray) -> bool:
    """Return True if all atoms bonded to ``own`` are on the far side of it, seen from ``other``."""
    residue, slot = own
    before = residue - 1 if slot == rc.atom_order["N"] and residue else residue
    near = atoms[before : residue + 1][present[before : residue + 1]]
    arms = near - atoms[residue, slot]
    length = np.linalg.norm(arms, axis=-1)
    arms = arms[(length > 0) & (length < _BONDED)]
    toward = atoms[tuple(other)] - atoms[residue, slot]
    cosine = arms @ toward / (np.linalg.norm(arms, axis=-1) * np.linalg.norm(toward)).clip(1e-9)
    return bool((cosine <= np.cos(np.deg2rad(MIN_ANGLE))).all())
