"""Atoms that contradict each other are refused, but for those of a ligand under a residue's number."""

from __future__ import annotations

from fastfold.protein.io.records import RecordedChain
from tests.helpers.residues import atom


def test_an_atom_that_is_there_twice_is_refused() -> None:
    chain = RecordedChain("A")
    assert chain.add_atom(atom("CA"), 1, "", hetero=False) == ""
    assert "residue ALA 1 of chain 'A' has its atom CA twice" in chain.add_atom(
        atom("CA"), 1, "", hetero=False
    )
    assert chain.add_atom(atom("CA", alternate="B"), 1, "", hetero=False) == ""
    assert chain.add_atom(atom("CA"), 1, "A", hetero=False) == ""  # another residue by its insertion code
    assert len(chain.residues) == 2


def test_two_residues_under_one_number_are_refused_unless_they_are_alternates() -> None:
    chain = RecordedChain("A")
    chain.add_atom(atom("CA", "SER", alternate="A"), 1, "", hetero=False)
    assert chain.add_atom(atom("CA", "ALA", alternate="B"), 1, "", hetero=False) == ""
    assert "is SER in an earlier record and GLY here" in chain.add_atom(
        atom("CA", "GLY"), 1, "", hetero=False
    )
    (residue,) = chain.residues.values()
    assert residue.names == ["SER", "ALA"]


def test_a_ligand_under_the_number_of_a_residue_is_left_out() -> None:
    chain = RecordedChain("A")
    chain.add_atom(atom("CA"), 1, "", hetero=False)
    assert chain.add_atom(atom("C1", "LIG"), 1, "", hetero=True) == ""
    (residue,) = chain.residues.values()
    assert residue.names == ["ALA"]


def test_stated_positions_tell_residues_apart() -> None:
    chain = RecordedChain("A")
    chain.add_atom(atom("CA"), 1, "", hetero=False, position=0)
    chain.add_atom(atom("CA", "GLY"), 1, "", hetero=False, position=1)
    assert [residue.position for residue in chain.residues.values()] == [0, 1]
