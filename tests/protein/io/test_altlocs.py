"""A residue is taken from one alternate location."""

from __future__ import annotations

from fastfold.protein import residue_constants as rc
from fastfold.protein.io.records import ResidueRecord, bonded, choose_conformer
from tests.helpers.residues import atom, conformer

CA, CB = rc.atom_order["CA"], rc.atom_order["CB"]


def test_the_best_occupied_location_is_taken_and_only_what_it_lacks_from_the_next() -> None:
    atoms = [
        atom("CA", x=1.0, alternate="A", occupancy=0.4),
        atom("CB", x=2.0, alternate="A", occupancy=0.4),
        atom("CA", x=3.0, alternate="B", occupancy=0.6),
    ]
    found = choose_conformer(ResidueRecord(1, "", False, atoms=atoms), {})
    assert found is not None
    assert {slot: one.x for slot, one in found.atoms.items()} == {CA: 3.0, CB: 2.0}


def test_of_two_amino_acids_at_one_place_none_gets_atoms_of_the_other() -> None:
    atoms = [
        atom("CA", "SER", alternate="A", occupancy=0.6),
        atom("CA", "ALA", alternate="B", occupancy=0.4),
        atom("CB", "ALA", alternate="B", occupancy=0.4),
    ]
    found = choose_conformer(ResidueRecord(1, "", False, atoms=atoms), {})
    assert found is not None
    assert (found.letter, set(found.atoms)) == ("S", {CA})


def test_an_unknown_name_counts_where_it_has_a_backbone() -> None:
    ligand = ResidueRecord(1, "", True, atoms=[atom("CA", "LIG")])
    assert choose_conformer(ligand, {}) is None
    ligand.atoms += [atom("N", "LIG"), atom("C", "LIG")]
    found = choose_conformer(ligand, {})
    assert found is not None
    assert (found.letter, found.known) == ("X", False)


def test_arginine_nitrogens_are_named_by_their_distance_from_cd() -> None:
    atoms = [atom("CD", "ARG"), atom("NH1", "ARG", 3.0), atom("NH2", "ARG", 2.0)]
    found = choose_conformer(ResidueRecord(1, "", False, atoms=atoms), {})
    assert found is not None
    assert found.atoms[rc.atom_order["NH1"]].x == 2.0
    assert found.atoms[rc.atom_order["NH2"]].x == 3.0


def test_neighbours_are_bonded_and_others_are_not() -> None:
    assert bonded(conformer("ALA", 1, 0), conformer("GLY", 2, 1))
    assert bonded(conformer("ALA", 1, 0), conformer("GLY", 2, 2)) is False
    without = conformer("GLY", 2, 1)
    del without.atoms[rc.atom_order["N"]]
    assert bonded(conformer("ALA", 1, 0), without) is None
