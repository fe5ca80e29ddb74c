"""Residues are called what their authors called them."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein.labels import AuthorNames, author_names, residue_label
from fastfold.protein.protein import Hydrogens
from fastfold.protein.structure import ChainStructure, Structure
from tests.helpers.peptides import helix


def structure(*numbers: str) -> Structure:
    n = len(numbers)
    chain = ChainStructure(
        chain_id="Q",
        sequence="A" * n,
        positions=np.zeros((n, 37, 3), np.float32),
        mask=np.zeros((n, 37), np.float32),
        residue_index=np.arange(n, dtype=np.int32),
        b_factors=np.zeros((n, 37), np.float32),
        author_numbers=numbers,
    )
    return Structure(name="x", chains=(chain,))


@pytest.mark.parametrize(
    ("observed", "names"),
    [
        (("5", "6"), ("5", "6")),
        (("", "6", "", "8", ""), ("5", "6", "7", "8", "9")),
        (("", "-1", "", ""), ("-2", "-1", "0", "1")),
        (("52", "52A", "", "53"), ("52", "52A", "", "53")),  # no number is free
        (("10", "", "11"), ("10", "", "11")),
    ],
)
def test_residues_without_atoms_count_on_where_the_number_is_free(
    observed: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert author_names(structure(*observed)) == AuthorNames(("Q",), names)


def test_labels_and_numbers() -> None:
    protein = helix("AK", "G")
    assert residue_label(protein, 1) == "LYS 2 of chain A"
    names = AuthorNames(("x", "y"), ("-3", "-3B", "7"))
    assert residue_label(protein, 1, names) == "LYS -3B of chain x"
    assert names.split_number(1) == (-3, "B")
    own = AuthorNames(("x", "y"), ("-3", "-3B", "7"), ("ALA", "LYN", ""))
    assert residue_label(protein, 1, own) == "LYN -3B of chain x"
    assert residue_label(protein, 2, own) == "GLY 7 of chain y"
    with pytest.raises(ValueError, match="expected a number"):
        AuthorNames(("x",), ("",)).split_number(0)


def test_hydrogens_are_checked() -> None:
    assert len(Hydrogens(np.array([0, 0]), ("HA", "HB2"), np.zeros((2, 3)))) == 2
    with pytest.raises(ValueError, match="2 names"):
        Hydrogens(np.array([0]), ("HA", "HB2"), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="must not decrease"):
        Hydrogens(np.array([1, 0]), ("HA", "HB2"), np.zeros((2, 3)))
