"""Copies of a chain are exchangeable when two structures are compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.protein.metrics.chain_mapping import chain_candidates, map_chains
from fastfold.protein.metrics.compare import compare_structures
from fastfold.protein.metrics.tm_score import tm_score
from fastfold.protein.protein import Protein
from tests.helpers.complexes import FIRST, SECOND, cut, helix_chain, joined, perturbed, ring

PARALOG = FIRST[:15] + SECOND[:10] + FIRST[25:]
"""Two thirds of its residues are those of ``FIRST``."""


def _names(order: list[int]) -> dict[str, str]:
    """Mapping of a prediction whose chains are those of the reference in an order."""
    return {"ABCDEFGH"[place]: "ABCDEFGH"[chain] for place, chain in enumerate(order)}


@pytest.mark.parametrize("order", [[1, 2, 0], [2, 1, 0], [0, 2, 1]])
def test_renamed_copies_are_the_same_structure(order: list[int]) -> None:
    chains = perturbed(ring(FIRST, 3, 9.0), 0.5)
    scores = compare_structures(joined([chains[i] for i in order]), joined(chains))
    assert scores.tm_score == pytest.approx(1.0, abs=1e-9)
    assert scores.rmsd_ca == pytest.approx(0.0, abs=1e-6)
    assert scores.lddt == scores.lddt_ca == scores.gdt_ha == pytest.approx(1.0)
    assert scores.lddt_interface == pytest.approx(1.0)
    assert scores.chain_mapping == scores.dockq_mapping == _names(order)


def test_copies_of_two_chains_are_mapped_together() -> None:
    chains = perturbed([*ring(FIRST, 2, 4.5), *ring(SECOND, 2, 5.0, 28.0)], 0.5)
    order = [3, 1, 2, 0]
    scores = compare_structures(joined([perturbed(chains, 0.3)[i] for i in order]), joined(chains))
    assert scores.chain_mapping == _names(order)


@pytest.mark.parametrize(("order", "kept"), [([2, 0], [0, 1, 2]), ([2, 1, 0], [0, 2])])
def test_missing_copies(order: list[int], kept: list[int]) -> None:
    """The prediction or the reference lacks a chain."""
    chains = perturbed(ring(FIRST, 3, 9.0), 0.8)
    reference = joined([chains[i] for i in kept])
    scores = compare_structures(joined([chains[i] for i in order]), reference)
    expected = {"ABC"[place]: "ABC"[kept.index(i)] for place, i in enumerate(order) if i in kept}
    assert scores.chain_mapping == expected
    assert scores.rmsd_ca == pytest.approx(0.0, abs=1e-6)
    assert scores.tm_score == pytest.approx(len(expected) / len(kept), abs=1e-6)


def test_copies_may_lack_other_residues() -> None:
    """The first copy of the prediction has most residues in common with the wrong one."""
    chains = perturbed(ring(FIRST, 3, 9.0), 0.8)
    observed = [slice(0, 30), slice(6, 26), np.r_[0:10, 14:30]]
    reference = joined([cut(chain, rows) for chain, rows in zip(chains, observed, strict=True)])
    scores = compare_structures(joined([chains[i] for i in (1, 2, 0)]), reference)
    assert scores.chain_mapping == _names([1, 2, 0])
    assert (scores.tm_score, scores.aligned_residues) == (pytest.approx(1.0), 76)


def test_a_similar_chain_is_no_copy() -> None:
    """Chains of other sequences keep their partners, even where exchanging them would fit better."""
    reference = [helix_chain(FIRST), helix_chain(PARALOG, (9, 0, 0)), helix_chain(PARALOG, (0, 15, 0))]
    prediction = [helix_chain(PARALOG), helix_chain(FIRST, (9, 0, 0)), helix_chain(PARALOG, (0, 15, 0))]
    scores = compare_structures(joined(prediction), joined(reference))
    assert scores.chain_mapping["B"] == "A"


def test_similar_chains_that_are_left_over_are_compared() -> None:
    reference = joined([helix_chain(FIRST), helix_chain(PARALOG, (9, 0, 0))])
    prediction = joined([helix_chain(FIRST, (9, 0, 0)), helix_chain(FIRST)])
    scores = compare_structures(prediction, reference)
    assert set(scores.chain_mapping.values()) == {"A", "B"}


def test_the_most_similar_of_the_chains_that_are_left_over_is_compared() -> None:
    distant = FIRST[:13] + SECOND[:17]
    candidates = chain_candidates([FIRST, FIRST], [FIRST, distant, PARALOG])
    assert 0.3 * 30 <= candidates.identical[0, 1] < candidates.identical[0, 2]
    assert {chain for _, chain in candidates.in_order()} == {0, 2}


@pytest.mark.parametrize("copies", [3, 6])
def test_atoms_that_are_not_there_place_no_copy(copies: int) -> None:
    """Most residues of the reference have any positions; few tell the mapping. Six copies are searched."""
    reference = joined(perturbed(ring(FIRST, copies, 4.0 * copies), 0.8))
    order = [2, 0, *range(3, copies), 1]
    chains = [cut(reference, chain) for chain in reference.chains]
    prediction = joined([chains[i] for i in order])
    points = torch.from_numpy(reference.atom_positions[:, 1]).clone()
    resolved = torch.arange(len(points)) % 30 < 8
    # Positions of unresolved residues suggest the order of the file.
    points[~resolved] = torch.from_numpy(prediction.atom_positions[:, 1])[~resolved]
    candidates = chain_candidates(prediction.sequences, reference.sequences)
    predicted = torch.from_numpy(prediction.atom_positions[:, 1])
    found = map_chains(candidates, predicted, points, torch.ones(len(points)), resolved.float())
    assert dict(found) == dict(enumerate(order))


def _tm_score(prediction: Protein, reference: Protein, rows: np.ndarray, *, quick: bool = False) -> float:
    ours, theirs = rows.T
    points = (
        torch.from_numpy(x.atom_positions[rows, 1]) for x, rows in ((prediction, ours), (reference, theirs))
    )
    mask = torch.ones(len(rows))
    return tm_score(*points, mask, reference_length=len(reference), quick=quick)


@pytest.mark.parametrize(
    "copies", [3, pytest.param(4, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)]
)
def test_no_mapping_has_a_larger_tm_score(copies: int) -> None:
    """Five copies have 120 mappings, which are searched, not enumerated."""
    reference = joined(perturbed(ring(FIRST, copies, 3.5 * copies), 0.8))
    order = [2, 0, *range(3, copies), 1]
    chains = [cut(reference, chain) for chain in reference.chains]
    prediction = joined([perturbed(chains, 2.0)[i] for i in order])
    candidates = chain_candidates(prediction.sequences, reference.sequences)
    rows = {mapping: candidates.rows(mapping) for mapping in candidates.mappings()}
    assert len(rows) == candidates.count == {3: 6, 4: 24, 5: 120}[copies]
    quick = {mapping: _tm_score(prediction, reference, one, quick=True) for mapping, one in rows.items()}
    largest = max(
        sorted(quick, key=lambda mapping: -quick[mapping])[:6],
        key=lambda m: _tm_score(prediction, reference, rows[m]),
    )
    ca = [torch.from_numpy(one.atom_positions[:, 1]) for one in (prediction, reference)]
    found = map_chains(candidates, *ca, *(torch.ones(len(points)) for points in ca))
    best = _tm_score(prediction, reference, rows[largest])
    assert _tm_score(prediction, reference, rows[found]) == pytest.approx(best, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("missing", [0, 3])
def test_many_copies_are_mapped(missing: int) -> None:
    """Twelve copies in two rings, of 12! mappings."""
    chains = perturbed([*ring(FIRST, 6, 14.0), *ring(FIRST, 6, 20.0, 30.0)], 0.7)
    order = np.random.default_rng(0).permutation(12)[: 12 - missing].tolist()
    prediction, reference = joined([perturbed(chains, 0.6)[i] for i in order]), joined(chains)
    candidates = chain_candidates(prediction.sequences, reference.sequences)
    ca = [torch.from_numpy(one.atom_positions[:, 1]) for one in (prediction, reference)]
    found = map_chains(candidates, *ca, *(torch.ones(len(points)) for points in ca))
    assert dict(found) == dict(enumerate(order))


def test_equal_mappings_keep_the_order_of_the_chains() -> None:
    chains = joined(ring(FIRST, 3, 9.0))
    scores = compare_structures(chains, chains)
    assert scores.chain_mapping == scores.dockq_mapping == _names([0, 1, 2])
