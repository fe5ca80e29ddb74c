"""Invented residues for the tests of what decides on them."""

from __future__ import annotations

from fastfold.protein.io.records import AtomRecord, Conformer, ResidueRecord, choose_conformer
from tests.helpers.structure_texts import BACKBONE


def atom(
    name: str,
    residue: str = "ALA",
    x: float = 0.0,
    *,
    alternate: str = "",
    occupancy: float = 1.0,
    y: float = 0.0,
) -> AtomRecord:
    """One atom."""
    return AtomRecord(residue, alternate, name, occupancy, x, y, 0.0, 9.0)


def residue(name: str, number: int, place: float, *, hetero: bool = False) -> ResidueRecord:
    """The backbone of a residue at this place of a straight chain, in which neighbours are bonded."""
    atoms = [atom(key, name, 3.8 * place + x) for key, x in BACKBONE.items()]
    return ResidueRecord(number, "", hetero, atoms=atoms)


def conformer(name: str, number: int, place: float) -> Conformer:
    """The same after all decisions."""
    found = choose_conformer(residue(name, number, place), {})
    assert found is not None
    return found
