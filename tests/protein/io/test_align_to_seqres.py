"""Observed residues find their places in the whole sequence, whatever their numbers are."""

from __future__ import annotations

import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.io.chains import place_in_sequence
from fastfold.protein.io.records import Conformer
from tests.helpers.residues import conformer

SEQUENCE = "MKTAYIAKQRQISFVKSHFS"


def observed(places: list[int], numbers: list[int]) -> list[Conformer]:
    """Residues of the sequence at these places, with these numbers."""
    return [
        conformer(rc.restype_1to3[SEQUENCE[place]], number, place)
        for place, number in zip(places, numbers, strict=True)
    ]


@pytest.mark.parametrize("places", [[*range(20)], [*range(3, 17)], [*range(2, 8), *range(12, 20)]])
@pytest.mark.parametrize("first", [1, -4, 100])
def test_numbers_that_lead_to_equal_residues_are_used(places: list[int], first: int) -> None:
    numbers = [first + place for place in places]
    missing = [first + place for place in range(20) if place not in places]
    assert place_in_sequence(observed(places, numbers), SEQUENCE, missing) == places


def test_bonds_and_residues_decide_where_numbers_are_odd() -> None:
    """Numbers that start anew within the chain."""
    places = [*range(2, 8), *range(12, 20)]
    numbers = [*range(50, 56), *range(1, 9)]
    assert place_in_sequence(observed(places, numbers), SEQUENCE) == places


def test_residues_of_another_chain_have_no_place() -> None:
    strangers = [conformer("TRP", number, number) for number in range(1, 11)]
    assert place_in_sequence(strangers, SEQUENCE) is None
    assert place_in_sequence(observed([*range(20)], [*range(1, 21)]), SEQUENCE[:10]) is None
