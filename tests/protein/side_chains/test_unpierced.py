"""Structures without a pierced ring, or with residues that must not move, stay as they are."""

from __future__ import annotations

import numpy as np

from fastfold.protein.geometry import follows
from fastfold.protein.side_chains.candidates import Candidates
from fastfold.protein.side_chains.rings import pierced_rings
from fastfold.protein.side_chains.unpierced import place_unpierced
from tests.helpers.peptides import helix
from tests.protein.side_chains.test_rings import ring_and_bond


def _no_candidates(residues: list[int]) -> list[Candidates]:
    raise AssertionError(residues)


def test_nothing_moves_without_a_pierced_ring() -> None:
    protein = helix("AFAYAWA")
    tied = follows(protein.chain_index, protein.residue_index)
    present = protein.atom_mask > 0.5
    everyone = np.ones(len(protein), bool)
    placed = place_unpierced(protein.atom_positions, present, protein.aatype, tied, everyone, _no_candidates)
    assert placed is protein.atom_positions


def test_residues_that_must_not_move_stay_with_a_pierced_ring() -> None:
    protein = ring_and_bond("F", 0.0, 0.0)
    xyz, present = protein.atom_positions, protein.atom_mask > 0.5
    tied = follows(protein.chain_index, protein.residue_index)
    assert pierced_rings(xyz, present, protein.aatype, tied)
    nobody = np.zeros(len(protein), bool)
    assert place_unpierced(xyz, present, protein.aatype, tied, nobody, _no_candidates) is xyz
