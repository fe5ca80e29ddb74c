"""Structures without crowded residues, or with residues that must not move, stay as they are."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import follows
from fastfold.protein.side_chains.candidates import RotamerCandidates
from fastfold.protein.side_chains.crowded import place_again
from fastfold.protein.side_chains.rings import pierced_rings
from tests.helpers.peptides import helix
from tests.protein.side_chains.test_rings import ring_and_bond


def _no_candidates(residues: list[int]) -> list[RotamerCandidates]:
    raise AssertionError(residues)


def test_nothing_moves_without_overlaps_and_pierced_rings() -> None:
    protein = helix("AFAYAWA")
    tied = follows(protein.chain_index, protein.residue_index)
    present = protein.atom_mask > 0.5
    everyone = np.ones(len(protein), bool)
    placed = place_again(
        protein.atom_positions, present, protein.aatype, tied, everyone, ~everyone, _no_candidates
    )
    assert placed is protein.atom_positions


def test_residues_that_must_not_move_stay_with_a_pierced_ring() -> None:
    protein = ring_and_bond("F", 0.0, 0.0)
    xyz, present = protein.atom_positions, protein.atom_mask > 0.5
    tied = follows(protein.chain_index, protein.residue_index)
    assert pierced_rings(xyz, present, protein.aatype, tied)
    nobody = np.zeros(len(protein), bool)
    for crowded in (nobody, ~nobody):
        assert place_again(xyz, present, protein.aatype, tied, nobody, crowded, _no_candidates) is xyz


def test_crowded_residues_take_their_best_candidates_and_others_stay() -> None:
    protein = helix("AKAKA")
    tied = follows(protein.chain_index, protein.residue_index)
    slot, energies = rc.atom_order["NZ"], np.array([2.0, 1.0])

    def candidates_of(residues: list[int]) -> list[RotamerCandidates]:
        assert residues == [3]
        points = protein.atom_positions[None, [3], slot].repeat(2, 0).astype(np.float64)
        points[1] += 0.5
        return [RotamerCandidates(3, [slot], points, np.array([1]), energies)]

    present, everyone = protein.atom_mask > 0.5, np.ones(len(protein), bool)
    placed = place_again(
        protein.atom_positions, present, protein.aatype, tied, everyone, np.arange(5) == 3, candidates_of
    )
    moved = placed - protein.atom_positions
    np.testing.assert_allclose(moved[3, slot], 0.5, atol=1e-5)
    moved[3, slot] = 0.0
    assert not moved.any()


def test_a_second_choice_that_pierces_a_ring_is_not_taken() -> None:
    protein = ring_and_bond("F", 0.0, 0.0)
    tied = follows(protein.chain_index, protein.residue_index)
    present, everyone = protein.atom_mask > 0.5, np.ones(len(protein), bool)
    (ring,) = pierced_rings(protein.atom_positions, present, protein.aatype, tied)
    residue, slot = ring.bond[1]
    apart = protein.atom_positions.astype(np.float64)
    apart[residue, slot] += 20.0
    assert not pierced_rings(apart, present, protein.aatype, tied)

    def candidates_of(residues: list[int]) -> list[RotamerCandidates]:
        points = protein.atom_positions[None, [residue], slot].astype(np.float64)
        return [RotamerCandidates(residue, [slot], points, np.array([0]), np.zeros(1))]

    crowded = np.arange(len(protein)) == residue
    assert place_again(apart, present, protein.aatype, tied, everyone, crowded, candidates_of) is apart
