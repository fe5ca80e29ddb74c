"""The value object: what it accepts, how it cuts chains, how chains are named."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.data.targets import make_chains
from fastfold.errors import OutputError
from fastfold.protein.protein import PDB_CHAIN_IDS, chain_name, check_writable
from tests.helpers.structures import make_protein


def test_chain_names_are_distinct_and_start_with_the_letters_of_pdb_files():
    names = [chain_name(i) for i in range(5000)]
    assert len(set(names)) == len(names)
    assert names[:62] == list(PDB_CHAIN_IDS)
    assert names[61:65] == ["9", "AA", "AB", "AC"]
    assert names[62 + 62 * 62] == "AAA"


def test_chains_are_named_in_files_as_they_are_in_targets():
    assert [chain.id for chain in make_chains(["A"] * 200)] == [chain_name(i) for i in range(200)]


def test_chains_and_sequences_follow_the_chain_index():
    protein = make_protein("ACD", "X", "WY")
    assert protein.chains == (slice(0, 3), slice(3, 4), slice(4, 6))
    assert protein.sequences == ("ACD", "X", "WY")
    assert len(protein) == 6


def test_arrays_get_the_documented_types_without_a_copy_where_they_have_them():
    positions = np.zeros((2, 37, 3), np.float32)
    protein = make_protein("AC", atom_positions=positions, aatype=np.array([0, 4], np.int64))
    assert protein.atom_positions is positions
    assert protein.aatype.dtype == np.int32
    assert protein.b_factors.dtype == np.float32


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("atom_positions", np.zeros((3, 14, 3)), "atom_positions has shape"),
        ("atom_mask", np.zeros((2, 37)), "atom_mask has shape"),
        ("aatype", [0, 21, 0], r"0\.\.20"),
        ("aatype", [0, -1, 0], r"0\.\.20"),
        ("chain_index", [1, 1, 1], "without a gap"),
        ("chain_index", [0, 2, 2], "without a gap"),
        ("chain_index", [0, 1, 0], "without a gap"),
        ("residue_index", [1, 2, 1], "repeats a number"),
        ("residue_index", [1.0, 2.5, 3.0], "whole numbers of 32 bits"),
        ("residue_index", [1, 2, np.nan], "whole numbers of 32 bits"),
        ("aatype", np.array([0, 2**32, 1]), "whole numbers of 32 bits"),
        ("aatype", list("ACD"), "aatype must be numbers"),
    ],
)
def test_inconsistent_arrays_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        make_protein("ACD", **{field: value})


def test_a_structure_without_atoms_is_not_writable():
    with pytest.raises(OutputError, match="no atoms"):
        check_writable(make_protein("XXX"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["atom_positions", "b_factors"])
def test_values_that_are_not_finite_are_refused_by_residue_and_atom(field, value):
    protein = make_protein("ACD", "WY")
    getattr(protein, field)[4, 1] = value
    with pytest.raises(OutputError, match="the first is CA of TYR 2 in chain B"):
        check_writable(protein)


def test_values_of_absent_atoms_do_not_count():
    protein = make_protein("GX")
    protein.atom_positions[protein.atom_mask == 0] = np.nan
    protein.b_factors[1] = np.nan
    check_writable(protein)
