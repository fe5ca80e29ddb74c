"""All scores of a prediction at once, and the residues they compare."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.chain_mapping import align_residues, corresponding_residues
from fastfold.protein.metrics.compare import StructureScores, compare_structures
from tests.helpers.complexes import cut
from tests.helpers.structures import make_protein

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"
CA = rc.atom_order["CA"]


def _perfect(scores: StructureScores, aligned: int, length: int) -> None:
    assert (scores.aligned_residues, scores.reference_residues) == (aligned, length)
    assert scores.rmsd_ca == pytest.approx(0.0, abs=1e-4)
    assert scores.drmsd_ca == pytest.approx(0.0, abs=1e-4)


def test_a_structure_against_itself() -> None:
    protein = make_protein(SEQUENCE)
    scores = compare_structures(protein, protein)
    _perfect(scores, len(SEQUENCE), len(SEQUENCE))
    for name in ("lddt_ca", "lddt", "tm_score", "gdt_ts", "gdt_ha"):
        assert getattr(scores, name) == pytest.approx(1.0), name
    np.testing.assert_allclose(scores.lddt_ca_per_residue, 1.0)


def test_missing_residues_of_the_reference_do_not_count() -> None:
    """The experiment saw 20 of 32 residues; a prediction of all 32 is still perfect."""
    prediction = make_protein(SEQUENCE)
    keep = np.ones(32, bool)
    keep[:4] = keep[14:20] = keep[30:] = False
    scores = compare_structures(prediction, cut(prediction, keep))
    _perfect(scores, 20, 20)
    assert scores.tm_score == scores.gdt_ts == scores.lddt == pytest.approx(1.0)


@pytest.mark.parametrize(
    "missing",
    [[1], [1, 31], [9, 10]],
    ids=["near an end", "near both ends", "in repeated letters"],
)
def test_residue_numbers_place_gaps_that_an_alignment_cannot(missing: list[int]) -> None:
    """An alignment pays for a gap near an end by two mismatches, and cannot tell which A of AAAAAA is missing."""
    sequence = "MKTWYIAAAAAAGSSVKHFERLMNQWEYTCDHP"
    prediction = make_protein(sequence)
    keep = np.ones(len(sequence), bool)
    keep[missing] = False
    reference = cut(prediction, keep)
    reference = dataclasses.replace(reference, residue_index=reference.residue_index + 40)
    for pair in ((prediction, reference), (reference, prediction)):
        scores = compare_structures(*pair)
        assert scores.rmsd_ca == pytest.approx(0.0, abs=1e-4)
        assert scores.aligned_residues == len(reference)
        assert set(np.flatnonzero(keep)) == set(
            np.flatnonzero(scores.reference_rows >= 0)
            if pair[0] is prediction
            else scores.reference_rows.tolist()
        )


def test_an_alignment_is_used_where_numbers_do_not_agree() -> None:
    """Numbers of the reference jump at another place than those of the prediction."""
    shifted = np.arange(32) + np.where(np.arange(32) < 16, 0, 5)
    rows = corresponding_residues(SEQUENCE, SEQUENCE, np.arange(32), shifted)
    assert rows.tolist() == [[i, i] for i in range(32)]
    apart = corresponding_residues("ACD", "WYV", np.array([1, 2, 5]), np.array([1, 2, 3]))
    assert apart.shape[1] == 2


def test_missing_residues_of_the_prediction_do_count() -> None:
    reference = make_protein(SEQUENCE)
    reference = dataclasses.replace(reference, atom_positions=reference.atom_positions / 8.0)
    half = cut(reference, np.arange(32) < 16)
    scores = compare_structures(half, reference)
    _perfect(scores, 16, 32)
    assert scores.tm_score == scores.gdt_ts == scores.gdt_ha == pytest.approx(0.5)
    assert scores.lddt_ca < 0.6
    assert scores.lddt < 0.6
    assert scores.lddt_ca_per_residue[16:].max() < 1e-6


def test_unresolved_atoms_and_residues_of_the_reference() -> None:
    """Atoms that the reference lacks may hold anything, and residues without CA have no score."""
    protein = make_protein(SEQUENCE)
    mask, positions = protein.atom_mask.copy(), protein.atom_positions.copy()
    mask[5] = 0.0
    positions[mask < 0.5] = np.nan
    reference = dataclasses.replace(protein, atom_mask=mask, atom_positions=positions)
    scores = compare_structures(protein, reference)
    _perfect(scores, 31, 31)
    assert np.flatnonzero(np.isnan(scores.lddt_ca_per_residue)).tolist() == [5]
    assert scores.lddt == scores.lddt_ca == pytest.approx(1.0)


@pytest.mark.parametrize("atom", ["O", "CA"])
def test_positions_that_are_not_finite_are_refused(atom: str) -> None:
    """Distances to them would not count, as if the structure lacked the atom."""
    protein = make_protein(SEQUENCE)
    positions = protein.atom_positions.copy()
    positions[5, rc.atom_order[atom]] = np.nan
    broken = dataclasses.replace(protein, atom_positions=positions)
    for pair in ((broken, protein), (protein, broken)):
        with pytest.raises(InputError, match="a position is not finite"):
            compare_structures(*pair)


def test_nothing_in_common() -> None:
    with pytest.raises(InputError, match="same protein"):
        compare_structures(make_protein("GGGG"), make_protein("WWWW"))


def test_chains_find_their_partners() -> None:
    """Chains stand in another order in the reference, which lacks one."""
    prediction = make_protein("MKTAYIAKQR", "WWHGPLNDEE", "CCVTSFFLYD")
    reference = cut(prediction, np.r_[20:30, 0:10])
    _perfect(compare_structures(prediction, reference), 20, 20)


def test_chains_without_a_partner_are_left_out() -> None:
    reference = make_protein("MKTAYIAKQR")
    prediction = make_protein("MKTAYIAKQR", "MKTAYIAKQR")
    assert compare_structures(prediction, reference).aligned_residues == 10


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("ACDE", "ACDE", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("MKTAYIAKQR", "AYIAKQ", [(i + 3, i) for i in range(6)]),
        ("GSHMAYIAKQ", "AYIAKQLL", [(i + 4, i) for i in range(6)]),
        (
            SEQUENCE,
            SEQUENCE[:12] + SEQUENCE[19:],
            [(i, i if i < 12 else i - 7) for i in range(32) if not 12 <= i < 19],
        ),
        ("MGGGGGGGAYIAKQ", "MAYIAKQ", [(i + 7, i) for i in range(7)]),
        ("", "ACD", []),
        ("MKTAYUAKQR", "MKTAYIAKQR", [(i, i) for i in range(10)]),
    ],
    ids=["same", "termini", "tag", "loop", "free ends", "empty", "unknown letter"],
)
def test_alignment(a: str, b: str, expected: list[tuple[int, int]]) -> None:
    assert align_residues(a, b).tolist() == [list(pair) for pair in expected]


@settings(max_examples=30, deadline=None)
@given(st.text("ACDEFGHIKLMNPQRSTVWYX", max_size=30), st.text("ACDEFGHIKLMNPQRSTVWYX", max_size=30))
def test_alignments_increase(a: str, b: str) -> None:
    pairs = align_residues(a, b)
    assert (np.diff(pairs, axis=0) > 0).all()
    assert pairs.shape[1] == 2
    assert len(pairs) == 0 or (pairs.max(0) < [len(a), len(b)]).all()
