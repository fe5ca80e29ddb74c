"""Geometry checks in addition to AlphaFold's: handedness, twisted peptides and long backbone bonds."""

from __future__ import annotations

import numpy as np

from fastfold.errors import InputError
from fastfold.inference.relax.chain_breaks import follows
from fastfold.protein import residue_constants as rc
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Protein

CHIRAL_CENTRES = (
    ("ACDEFHIKLMNPQRSTVWY", "CA", ("N", "C", "CB")),
    ("T", "CB", ("CA", "OG1", "CG2")),
    ("I", "CB", ("CA", "CG1", "CG2")),
)
"""Residue types, chiral atom, and three neighbours whose triple product is positive in L-amino acids."""
_LEAST_MIRRORED = 3  #: Number of wrong hands from which a chain can be a mirror image
_LEAST_PHI = 8  #: Number of positive phi angles from which a chain without beta carbons can be a mirror image
MAX_TWIST = 45.0  #: Largest deviation of omega from cis or trans, in degrees
_MAX_STRETCH = 0.2  #: Largest deviation of a backbone bond from its length, in Å
_BACKBONE_BONDS = (("N", "CA", 1.458), ("CA", "C", 1.525), ("C", "O", 1.231))
"""Bonds within a residue and their lengths in Å."""
_PEPTIDE_BOND = 1.33


def wrong_hands(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues with a carbon of the wrong hand.

    Alpha carbons of all residues except glycine are checked, and beta carbons of threonine and isoleucine.
    """
    return np.logical_or.reduce([_hands(protein, *centre) < 0 for centre in CHIRAL_CENTRES])


def check_not_mirrored(protein: Protein, names: AuthorNames) -> None:
    """Refuse a mirrored chain.

    Raises:
        InputError: More than half of a chain's alpha carbons belong to D-amino acids, or, without beta carbons, more
            than half of its phi angles are positive.
    """
    hands, phi = _hands(protein, *CHIRAL_CENTRES[0]), _phi(protein)
    for name, rows in zip(names.chain_ids, protein.chains, strict=True):
        known = hands[rows][hands[rows] != 0]
        count, least, what = int((known < 0).sum()), _LEAST_MIRRORED, "alpha carbons are of D-amino acids"
        if not len(known):
            known = phi[rows][np.isfinite(phi[rows])]
            count, least, what = int((known > 0).sum()), _LEAST_PHI, "phi angles are positive"
        if count >= least and 2 * count > len(known):
            raise InputError(
                f"chain {name} is the mirror image of a protein: {count} of {len(known)} {what}; invert the sign of "
                "one coordinate of all atoms"
            )


def _hands(protein: Protein, residues: str, centre: str, neighbours: tuple[str, str, str]) -> np.ndarray:
    """Return 1 for residues of the right hand, -1 for the other, and 0 if undefined."""
    slots = [rc.atom_order[name] for name in (centre, *neighbours)]
    known = np.isin(protein.aatype, [rc.restype_order[letter] for letter in residues])
    known &= (protein.atom_mask[:, slots] > 0.5).all(-1)
    atoms = protein.atom_positions[:, slots].astype(np.float64)
    a, b, c = (atoms[:, k] - atoms[:, 0] for k in (1, 2, 3))
    return np.where(known, np.sign((np.cross(a, b) * c).sum(-1)), 0.0)


def _phi(protein: Protein) -> np.ndarray:
    """Return phi of residues other than glycine in degrees, NaN where it is not defined."""
    after = np.flatnonzero(follows(protein))
    angles, known = _torsions(protein, (after - 1, "C"), *((after, name) for name in ("N", "CA", "C")))
    known &= protein.aatype[after] != rc.restype_order["G"]
    phi = np.full(len(protein), np.nan)
    phi[after[known]] = angles[known]
    return phi


def _torsions(protein: Protein, *atoms: tuple[np.ndarray, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return torsion angles in degrees of four atoms of rows of residues, and a mask of those that are known."""
    places = [(rows, rc.atom_order[name]) for rows, name in atoms]
    known = np.all([protein.atom_mask[place] > 0.5 for place in places], axis=0)
    return dihedrals(*(protein.atom_positions[place].astype(np.float64) for place in places)), known


def twisted_residues(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues after a peptide bond with omega far from cis and trans."""
    after = np.flatnonzero(follows(protein))
    before = after - 1
    omega, known = _torsions(protein, (before, "CA"), (before, "C"), (after, "N"), (after, "CA"))
    off_planar = np.minimum(np.abs(omega), 180.0 - np.abs(omega))
    return _both_ends(before, after, known & (off_planar > MAX_TWIST), len(protein))


def stretched_residues(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues with a backbone bond of wrong length."""
    every = np.arange(len(protein))
    found = np.zeros(len(protein), bool)
    bonds = [(every, first, every, second, length) for first, second, length in _BACKBONE_BONDS]
    after = np.flatnonzero(follows(protein))
    for rows, first, others, second, length in [*bonds, (after - 1, "C", after, "N", _PEPTIDE_BOND)]:
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


def _both_ends(before: np.ndarray, after: np.ndarray, chosen: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count, bool)
    found[before[chosen]] = found[after[chosen]] = True
    return found
