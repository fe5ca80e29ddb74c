"""Bond lengths and angles against the statistics of Engh and Huber, and the hands of carbons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import angles, follows
from fastfold.protein.protein import Protein

MAX_DEVIATION = 4.0  #: Standard deviations beyond which a length or an angle is an outlier, as in MolProbity

CHIRAL_CENTERS = (
    ("ACDEFHIKLMNPQRSTVWY", "CA", ("N", "C", "CB")),
    ("T", "CB", ("CA", "OG1", "CG2")),
    ("I", "CB", ("CA", "CG1", "CG2")),
)
"""Residue types, chiral atom, and three neighbours whose triple product is positive in L-amino acids."""


@dataclass(frozen=True)
class Measured:
    """Lengths or angles of a structure with their expected values, ``M`` of them."""

    residue: np.ndarray  #: ``[M]`` index of the residue, of a peptide bond the later one
    values: np.ndarray  #: ``[M]`` in Å or degrees
    means: np.ndarray  #: ``[M]`` expected values
    deviations: np.ndarray  #: ``[M]`` standard deviations

    @property
    def outliers(self) -> np.ndarray:
        """Mask ``[M]`` of values more than :data:`MAX_DEVIATION` standard deviations from their means, or NaN."""
        return ~(np.abs(self.values - self.means) <= MAX_DEVIATION * self.deviations)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return rows of bonds and of angles: types and slots ``[K, 3]`` or ``[K, 4]``, and means and deviations."""
    tables = []
    for table, atoms in zip(rc.stereochemistry(), (2, 3), strict=True):
        keys = [
            (rc.restype_order[rc.restype_3to1[row[0]]], *(rc.atom_order[name] for name in row[1 : 1 + atoms]))
            for row in table
        ]
        tables += [np.array(keys), np.array([row[1 + atoms :] for row in table], np.float64)]
    return tuple(tables)  # type: ignore[return-value]


def measure_bonds(protein: Protein) -> Measured:
    """Measure all bonds between present atoms within residues, and peptide bonds between neighbours by number."""
    keys, expected = _tables()[:2]
    rows, which = _residues_with(protein, keys)
    a, b = (protein.atom_positions[rows, keys[which, k]].astype(np.float64) for k in (1, 2))
    after = _bonded_after(protein)
    c = protein.atom_positions[after - 1, rc.atom_order["C"]].astype(np.float64)
    n = protein.atom_positions[after, rc.atom_order["N"]].astype(np.float64)
    is_proline = (protein.aatype[after] == rc.restype_order["P"]).astype(int)
    means, deviations = (
        np.array(table)[is_proline]
        for table in (rc.between_res_bond_length_c_n, rc.between_res_bond_length_stddev_c_n)
    )
    return Measured(
        residue=np.concatenate([rows, after]),
        values=np.linalg.norm(np.concatenate([a - b, c - n]), axis=-1),
        means=np.concatenate([expected[which, 0], means]),
        deviations=np.concatenate([expected[which, 1], deviations]),
    )


def measure_angles(protein: Protein) -> Measured:
    """Measure the bond angles between present atoms within residues."""
    keys, expected = _tables()[2:]
    rows, which = _residues_with(protein, keys)
    a, b, c = (protein.atom_positions[rows, keys[which, k]].astype(np.float64) for k in (1, 2, 3))
    return Measured(rows, angles(a, b, c), expected[which, 0], expected[which, 1])


def _residues_with(protein: Protein, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of residues and rows of a table, whose atoms are all present, each ``[M]``."""
    is_type = protein.aatype[:, None] == keys[:, 0]
    present = (protein.atom_mask > 0.5)[:, keys[:, 1:]].all(-1)
    return np.nonzero(is_type & present)  # type: ignore[return-value]


def _bonded_after(protein: Protein) -> np.ndarray:
    """Return residues that follow their predecessor by number, with both atoms of the peptide bond."""
    after = np.flatnonzero(follows(protein.chain_index, protein.residue_index))
    present = protein.atom_mask > 0.5
    return after[present[after - 1, rc.atom_order["C"]] & present[after, rc.atom_order["N"]]]


def hands(protein: Protein, residues: str, center: str, neighbors: tuple[str, str, str]) -> np.ndarray:
    """Return the hand ``[N]`` of a chiral atom: 1 as in proteins, -1 for its mirror image, 0 if undefined.

    Arguments are a row of :data:`CHIRAL_CENTERS`.
    """
    slots = [rc.atom_order[name] for name in (center, *neighbors)]
    known = np.isin(protein.aatype, [rc.restype_order[letter] for letter in residues])
    known &= (protein.atom_mask[:, slots] > 0.5).all(-1)
    atoms = protein.atom_positions[:, slots].astype(np.float64)
    a, b, c = (atoms[:, k] - atoms[:, 0] for k in (1, 2, 3))
    return np.where(known, np.sign((np.cross(a, b) * c).sum(-1)), 0.0)


def wrong_hands(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues with a carbon of the wrong hand: CA, and CB of threonine and isoleucine."""
    return np.logical_or.reduce([hands(protein, *center) < 0 for center in CHIRAL_CENTERS])
