"""A chain is what its residues, its sequence and its bonds say together."""

from __future__ import annotations

import pytest

from fastfold.protein.io.chains import build_chain, residue_index_from_numbers
from fastfold.protein.io.records import RecordedChain, ResidueRecord
from tests.helpers.residues import conformer, residue


def chain(*residues: ResidueRecord, **options: object) -> RecordedChain:
    """A chain of these residues."""
    record = RecordedChain("A", **options)  # type: ignore[arg-type]
    record.residues = {(one.number, one.insertion): one for one in residues}
    return record


def test_residues_that_were_not_observed_stand_in_the_sequence_without_atoms() -> None:
    record = chain(residue("ALA", 1, 0), residue("SER", 3, 2), sequence=["ALA", "GLY", "SER"], missing=[2])
    found = build_chain(record, {}, [])
    assert found is not None
    assert found.sequence == "AGS"
    assert found.mask.any(-1).tolist() == [True, False, True]
    assert found.residue_index.tolist() == [0, 1, 2]


def test_a_sequence_that_does_not_fit_is_not_used_and_said() -> None:
    warnings: list[str] = []
    found = build_chain(chain(residue("ALA", 1, 0), residue("SER", 2, 1), sequence=["TRP"]), {}, warnings)
    assert found is not None
    assert found.sequence == "AS"
    assert "do not fit its sequence" in warnings[0]


@pytest.mark.parametrize(("place", "sequence"), [(2.0, "ASX"), (9.0, "AS")])
def test_an_unknown_residue_counts_where_a_bond_joins_it(place: float, sequence: str) -> None:
    record = chain(residue("ALA", 1, 0), residue("SER", 2, 1), residue("ODD", 3, place, hetero=True))
    found = build_chain(record, {}, [])
    assert found is not None
    assert found.sequence == sequence


def test_what_the_file_says_to_be_no_protein_is_none() -> None:
    assert build_chain(chain(residue("ALA", 1, 0), protein=False), {}, []) is None
    assert build_chain(chain(), {}, []) is None


def test_bonds_overrule_numbers_and_numbers_only_grow() -> None:
    residues = [conformer("ALA", number, place) for number, place in ((5, 0), (9, 1), (12, 3), (2, 5))]
    assert residue_index_from_numbers(residues).tolist() == [5, 6, 9, 10]
