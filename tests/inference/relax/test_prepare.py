"""What is given to OpenMM: all atoms, chains without gaps, the same each time; and what is refused by name."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fastfold.errors import InputError, OutputError
from fastfold.inference.relax.prepare import check_relaxable, prepare, segments, to_protein
from fastfold.protein import residue_constants as rc
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Protein
from tests.helpers.peptides import helix

OXT = rc.atom_order["OXT"]


def without(protein: Protein, residue: int, *atoms: str) -> Protein:
    mask = protein.atom_mask.copy()
    mask[residue, [rc.atom_order[atom] for atom in atoms] if atoms else slice(None)] = 0
    return replace(protein, atom_mask=mask)


def test_missing_atoms_and_hydrogens_are_added_and_what_was_there_stays() -> None:
    whole = helix("AKLEW")
    prepared = prepare(without(whole, 2, "CD1", "CD2"))
    assert prepared.atoms_added == 3  # both, and the terminal oxygen
    protein, hydrogens = to_protein(prepared, prepared.positions, without(whole, 2, "CD1", "CD2"))
    present = whole.atom_mask > 0.5
    assert (protein.atom_mask > 0.5)[present].all()
    assert protein.atom_mask.sum() == present.sum() + 1
    assert protein.atom_mask[-1, OXT] == 1
    kept = present.copy()
    kept[2, [rc.atom_order["CD1"], rc.atom_order["CD2"]]] = False
    np.testing.assert_allclose(protein.atom_positions[kept], whole.atom_positions[kept], atol=0.0006)
    # Charged ends, LYS and GLU at pH 7: 7 + 13 + 11 + 6 + 10 hydrogens in the chain, 2 more at its start.
    count = np.bincount(hydrogens.residues)
    assert count.tolist() == [5 + 2, 13, 11, 6, 10]
    assert {"H", "H2", "H3"} <= {
        n for n, r in zip(hydrogens.names, hydrogens.residues, strict=True) if r == 0
    } | {"H"}
    assert (protein.b_factors[2][protein.atom_mask[2] > 0.5] == 52).all()


def test_hydrogens_are_the_same_each_time_and_python_s_generator_is_left_alone() -> None:
    random.seed(5)
    first = prepare(helix("ASTW"))
    state = random.getstate()
    random.seed(99)
    second = prepare(helix("ASTW"))
    np.testing.assert_array_equal(first.positions, second.positions)
    random.seed(5)
    assert random.getstate() == state


def test_chains_end_at_gaps_terminal_oxygens_and_between_chains() -> None:
    protein = helix("AAAAAA", "GG")
    assert segments(protein) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert segments(without(protein, 2)) == [[0, 1], [3, 4, 5], [6, 7]]
    numbers = protein.residue_index.copy()
    numbers[3:6] += 10
    assert segments(replace(protein, residue_index=numbers)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    mask = protein.atom_mask.copy()
    mask[1, OXT] = 1
    assert segments(replace(protein, atom_mask=mask)) == [[0, 1], [2, 3, 4, 5], [6, 7]]


def test_a_terminal_oxygen_is_added_at_the_end_of_a_chain_and_not_at_a_gap() -> None:
    protein = helix("AAXAA", "GG")
    prepared = prepare(protein)
    found, _ = to_protein(prepared, prepared.positions, protein)
    assert np.flatnonzero(found.atom_mask[:, OXT]).tolist() == [4, 6]
    assert found.atom_mask[2].sum() == 0


def test_a_residue_alone_gets_caps_without_a_charge_and_keeps_its_terminal_oxygen() -> None:
    protein = helix("AAA", "W", "AAA")
    prepared = prepare(protein)
    assert [r.name for r in prepared.topology.residues()][3:6] == ["ACE", "TRP", "NME"]
    assert (prepared.residue_of < 0).sum() == 12
    assert prepared.atoms_added == 2  # terminal oxygens of both chains of three
    mask = protein.atom_mask.copy()
    mask[3, OXT] = 1
    last = prepare(replace(protein, atom_mask=mask))
    assert [r.name for r in last.topology.residues()][3:6] == ["ACE", "TRP", "ALA"]
    found, hydrogens = to_protein(last, last.positions, replace(protein, atom_mask=mask))
    assert found.atom_mask[3, OXT] == 1
    assert hydrogens.residues.min() == 0


def test_near_sulphurs_are_bonded() -> None:
    protein = helix("ACA", "ACA")
    sg = rc.atom_order["SG"]
    xyz = protein.atom_positions.copy()
    # The second chain turned by half a turn about an axis beside the first one's sulphur.
    axis = xyz[1, sg] + np.float32([1.0, 0.0, 0.0])
    xyz[3:] = (xyz[:3] - axis) * np.float32([-1, -1, 1]) + axis
    names = {
        a.name for a in prepare(replace(protein, atom_positions=xyz)).topology.atoms() if a.residue.index == 1
    }
    assert "HG" not in names
    names = {a.name for a in prepare(protein).topology.atoms() if a.residue.index == 1}
    assert "HG" in names


@pytest.mark.parametrize(
    ("protein", "message"),
    [
        (
            without(helix("AAA", "W"), 3, "C"),
            "TRP 1 of chain B is not bonded to another residue and lacks N, CA or C",
        ),
        (without(without(helix("AAAA"), 1), 0, "N"), "ALA 1 of chain A is not bonded to another residue"),
        (
            without(
                helix("AWA"),
                1,
                "CA",
                "C",
                "O",
                *["CB", "CG", "CD1", "CD2", "NE1", "CE2", "CE3", "CZ2", "CZ3"],
            ),
            "TRP 2 of chain A has 2",
        ),
    ],
)
def test_what_cannot_be_relaxed_is_refused_by_name(protein: Protein, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_relaxable(protein)


def test_unknown_residues_with_atoms_are_refused_by_the_author_s_name() -> None:
    protein = helix("AAAA")
    aatype = protein.aatype.copy()
    aatype[2] = rc.unk_restype_index
    names = AuthorNames(("Q",), ("7", "8", "8A", "9"))
    with pytest.raises(InputError, match="UNK 8A of chain Q is of unknown type and has atoms"):
        check_relaxable(replace(protein, aatype=aatype), names)


def test_positions_that_are_not_finite_are_refused() -> None:
    xyz = helix("AA").atom_positions.copy()
    xyz[1, 0, 0] = np.nan
    with pytest.raises(OutputError, match="without a finite position"):
        prepare(replace(helix("AA"), atom_positions=xyz))


def test_atoms_of_two_residues_on_each_other_are_refused_by_name() -> None:
    protein = helix("AAA", "AAA")
    xyz = protein.atom_positions.copy()
    xyz[3:] = xyz[:3]
    with pytest.raises(
        ValueError, match=r"ALA [123] of chain A and ALA [123] of chain B have the same position"
    ):
        prepare(replace(protein, atom_positions=xyz))


def test_atoms_on_each_other_are_refused_before_pdbfixer_is_stuck_on_them() -> None:
    with pytest.raises(ValueError, match="ALA 1 of chain A have the same position"):
        prepare(replace(helix("AA"), atom_positions=np.zeros((2, 37, 3))))
