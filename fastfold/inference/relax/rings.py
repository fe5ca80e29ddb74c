"""Rings of a structure that bonds pass through: their names, and the side chains to place again."""

from __future__ import annotations

from collections.abc import Iterable

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import follows
from fastfold.protein.labels import AuthorNames, residue_label
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.build import BACKBONE
from fastfold.protein.side_chains.rings import PiercedRing, pierced_rings


def rings_with_bonds(protein: Protein) -> tuple[PiercedRing, ...]:
    """Return the rings that a covalent bond passes through."""
    tied = follows(protein.chain_index, protein.residue_index)
    return pierced_rings(protein.atom_positions, protein.atom_mask, protein.aatype, tied)


def describe_ring(ring: PiercedRing, protein: Protein, names: AuthorNames | None = None) -> str:
    """Return the names of a ring's residue and of the bond through it, for messages."""
    (first, one), (second, other) = ring.bond
    atoms = f"{rc.atom_types[one]}-{rc.atom_types[other]} of {residue_label(protein, first, names)}"
    if second != first:
        atoms += f" and {residue_label(protein, second, names)}"
    return f"{residue_label(protein, ring.residue, names)} by {atoms}"


def side_chains_to_rebuild(rings: Iterable[PiercedRing], protein: Protein) -> set[int]:
    """Return the residues whose rotamers can free rings from bonds: those of the rings, and of bonds past CB."""
    residues = set()
    for ring in rings:
        if rc.restypes_with_x[protein.aatype[ring.residue]] != "P":  # proline's ring is part of the backbone
            residues.add(ring.residue)
        residues |= {residue for residue, slot in ring.bond if slot not in BACKBONE}
    return residues
