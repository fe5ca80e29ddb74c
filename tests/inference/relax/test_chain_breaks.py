"""Chains end where C and N are apart, whatever their residue numbers say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.inference.relax.prepare import segments
from fastfold.inference.relax.stereo import chain_breaks, open_breaks
from fastfold.protein import residue_constants as rc
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Protein
from tests.helpers.peptides import helix


def moved(protein: Protein, after: int, distance: float) -> Protein:
    xyz = protein.atom_positions.copy()
    xyz[after:, :, 2] += distance
    return replace(protein, atom_positions=xyz)


def test_numbers_tell_bonds_once_breaks_are_open() -> None:
    protein = moved(helix("AAAAAA", "GGG"), 3, 8.0)
    assert segments(protein) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    opened = open_breaks(protein)
    assert segments(opened) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert list(chain_breaks(opened)) == [(2, 3)]


def test_gaps_in_numbers_and_residues_without_atoms_stay_ends() -> None:
    protein = helix("AAXAAA")
    numbers = protein.residue_index.copy()
    numbers[4:] += 7
    gapped = replace(protein, residue_index=numbers)
    assert list(chain_breaks(gapped)) == [(1, 3), (3, 4)]
    assert segments(open_breaks(gapped)) == segments(gapped) == [[0, 1], [3], [4, 5]]
    assert chain_breaks(helix("AAA", "AAA")) == {}


@pytest.mark.parametrize("missing", ["C", "N"])
def test_alpha_carbons_decide_where_a_bonded_atom_is_missing(missing: str) -> None:
    protein = helix("AAAA")
    mask = protein.atom_mask.copy()
    mask[1 if missing == "C" else 2, rc.atom_order[missing]] = 0
    whole = replace(protein, atom_mask=mask)
    assert chain_breaks(open_breaks(whole)) == {}
    names = AuthorNames(("Q",), ("10", "10A", "11", "12"))
    (text,) = chain_breaks(open_breaks(moved(whole, 2, 9.0)), names).values()
    assert text.startswith("ALA 10A of chain Q and ALA 11 of chain Q (CA-CA ")


def test_numbers_of_one_chain_may_go_down() -> None:
    protein = replace(moved(helix("AAAA"), 2, 9.0), residue_index=np.array([7, 8, 9, 1]))
    opened = open_breaks(protein)
    assert segments(opened) == [[0, 1], [2], [3]]
