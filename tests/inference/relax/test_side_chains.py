"""Built side chains: L-amino acids of ideal geometry, without clashes; known atoms stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.inference.relax.prepare import prepare, to_protein
from fastfold.inference.relax.stereo import violating_residues, wrong_hands
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.placement import place_side_chains
from tests.helpers.peptides import helix

ALL = "PARNDCQEGHILKMFSTWYV"
BACKBONE = ("N", "CA", "C", "O")


def only(protein: Protein, residues: list[int], *kept: str) -> Protein:
    """Remove all atoms of some residues but those named."""
    mask = protein.atom_mask.copy()
    dropped = [slot for name, slot in rc.atom_order.items() if name not in kept]
    mask[np.ix_(residues, dropped)] = 0
    return replace(protein, atom_mask=mask, atom_positions=protein.atom_positions * mask[..., None])


def add_missing_atoms(protein: Protein) -> Protein:
    placed = place_side_chains(
        protein.atom_positions,
        protein.atom_mask,
        protein.aatype,
        chain_index=protein.chain_index,
        residue_index=protein.residue_index,
    )
    return replace(protein, atom_positions=placed.positions, atom_mask=placed.mask)


def test_side_chains_of_a_backbone_have_the_right_hand_and_no_clash() -> None:
    whole = helix(ALL)
    built = add_missing_atoms(only(whole, list(range(20)), *BACKBONE))
    np.testing.assert_array_equal(built.atom_mask, whole.atom_mask)
    assert not wrong_hands(built).any()
    broken = {v.residue for v in violating_residues(built)} - {v.residue for v in violating_residues(whole)}
    assert not broken
    for letter in "TI":
        i = ALL.index(letter)
        cb, others = (
            rc.atom_order["CB"],
            [rc.atom_order[n] for n in ("CA", "OG1" if letter == "T" else "CG1", "CG2")],
        )
        lengths = np.linalg.norm(built.atom_positions[i, others] - built.atom_positions[i, cb], axis=-1)
        np.testing.assert_allclose(lengths, [1.53, 1.43 if letter == "T" else 1.53, 1.53], atol=0.03)


def test_known_atoms_stay_and_fix_their_angles() -> None:
    """The helix has chi1 of -60 and other chi angles of 180 degrees, which no choice by clashes would know."""
    whole = helix("AKIEWTRAKL")
    cut = only(whole, [1], *BACKBONE, "CB", "CG", "CD")
    mask = cut.atom_mask.copy()
    mask[2, rc.atom_order["CG2"]] = mask[5, rc.atom_order["OG1"]] = mask[4, rc.atom_order["CZ2"]] = 0
    mask[6, rc.atom_order["O"]] = mask[7, rc.atom_order["CB"]] = 0
    cut = replace(cut, atom_mask=mask)
    built = add_missing_atoms(cut)
    known = cut.atom_mask > 0.5
    np.testing.assert_array_equal(built.atom_positions[known], cut.atom_positions[known])
    rebuilt = (whole.atom_mask > 0.5) & ~known
    rebuilt[1] = False
    np.testing.assert_allclose(built.atom_positions[rebuilt], whole.atom_positions[rebuilt], atol=0.02)


def test_a_rotamer_that_clashes_is_not_taken() -> None:
    """A neighbour's atom is where phenylalanine's ring would be."""
    protein = helix("AAFAA", "AA", apart=60.0)
    free = add_missing_atoms(only(protein, [2], *BACKBONE))
    ring = [rc.atom_order[name] for name in ("CG", "CD1", "CE1", "CZ", "CE2", "CD2")]
    xyz = protein.atom_positions.copy()
    xyz[5:] += free.atom_positions[2, ring].mean(0) - xyz[5, rc.atom_order["CB"]]
    met = add_missing_atoms(only(replace(protein, atom_positions=xyz), [2], *BACKBONE))
    obstacle = xyz[5, rc.atom_order["CB"]]
    assert np.linalg.norm(free.atom_positions[2, ring] - obstacle, axis=-1).min() < 2.0
    assert np.linalg.norm(met.atom_positions[2, ring] - obstacle, axis=-1).min() > 3.0


def test_residues_that_cannot_be_placed_are_left_alone() -> None:
    protein = helix("AKLA")
    missing_n = only(protein, [1], "CA", "C", "O", "CB")
    np.testing.assert_array_equal(add_missing_atoms(missing_n).atom_mask, missing_n.atom_mask)
    xyz = protein.atom_positions.copy()
    n, ca, c = (rc.atom_order[name] for name in ("N", "CA", "C"))
    xyz[1, c] = 2 * xyz[1, ca] - xyz[1, n]
    straight = only(replace(protein, atom_positions=xyz), [1], "N", "CA", "C")
    np.testing.assert_array_equal(add_missing_atoms(straight).atom_mask, straight.atom_mask)


@pytest.mark.parametrize("kept", [BACKBONE, (*BACKBONE, "CB")])
def test_prepared_structures_have_the_right_hands(kept: tuple[str, ...]) -> None:
    """pdbfixer alone builds D-amino acids here."""
    cut = only(helix("ATIVKTPE"), list(range(8)), *kept)
    prepared = prepare(cut)
    found, _ = to_protein(prepared, prepared.positions, cut)
    assert not wrong_hands(found).any()
    assert prepared.atoms_added == int(found.atom_mask.sum() - cut.atom_mask.sum())
