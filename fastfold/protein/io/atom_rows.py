"""Rows of a structure file: heavy atoms and hydrogens, residue by residue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastfold.errors import OutputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Hydrogens, Protein


class AtomRow(NamedTuple):
    """Row of a structure file.

    ``residue`` is the index in the protein's arrays. The first letter of the name is the element. Coordinates in Å are
    rounded to 0.001, the B-factor to 0.01.
    """

    residue: int
    name: str
    x: float
    y: float
    z: float
    b_factor: float


def atom_rows(protein: Protein, hydrogens: Hydrogens | None = None) -> list[AtomRow]:
    """Return all atoms in the order of a file: by residue, hydrogens after heavy atoms.

    A hydrogen has the B-factor of its residue's CA, or of the first atom if CA is missing.

    Raises:
        OutputError: The position of a hydrogen is not finite.
        ValueError: A hydrogen belongs to a missing residue or to one without atoms.
    """
    present = protein.atom_mask > 0.5
    residues, atoms = np.nonzero(present)
    names = [rc.atom_types[atom] for atom in atoms.tolist()]
    xyz, b_factors = protein.atom_positions[present], protein.b_factors[present]
    if hydrogens is not None:
        if not np.isfinite(hydrogens.positions).all():
            raise OutputError("the position of a hydrogen is not finite; relax the structure again")
        if len(hydrogens) and (hydrogens.residues[0] < 0 or hydrogens.residues[-1] >= len(protein)):
            raise ValueError("a hydrogen belongs to a residue that the protein lacks")
        if not present[hydrogens.residues].any(-1).all():
            raise ValueError("a hydrogen belongs to a residue without atoms")
        residues = np.concatenate([residues, hydrogens.residues])
        names += hydrogens.names
        xyz = np.concatenate([xyz, hydrogens.positions])
        b_factors = np.concatenate([b_factors, residue_b_factors(protein)[hydrogens.residues]])
    # Rounded here and added to zero, because a writer would print -0.0001 as -0.000.
    xyz = np.round(xyz.astype(np.float64), 3) + 0.0
    b_factors = np.round(b_factors.astype(np.float64), 2) + 0.0
    order = np.argsort(residues, kind="stable")
    columns = zip(
        residues[order].tolist(), order.tolist(), xyz[order].tolist(), b_factors[order].tolist(), strict=True
    )
    return [AtomRow(residue, names[i], x, y, z, b) for residue, i, (x, y, z), b in columns]


def residue_b_factors(protein: Protein) -> np.ndarray:
    """Return B-factors ``[N]`` float32 of residues: of CA, or of the first atom; 0 without atoms."""
    present = protein.atom_mask > 0.5
    ca = rc.atom_order["CA"]
    atom = np.where(present[:, ca], ca, present.argmax(-1))
    return protein.b_factors[np.arange(len(protein)), atom] * present.any(-1)
