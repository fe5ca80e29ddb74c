"""Clashes between chains are counted by their definitions, and many of them lower the rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.inference.output.writer import listed_scores, ranking_scores
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface import interface_scores, without_scores
from fastfold.protein.metrics.lddt import chain_clashes, count_clashes
from tests.helpers.results import helix_prediction

CA, SG = rc.atom_order["CA"], rc.atom_order["SG"]


def strands(distance: float, *lengths: int, atom: int = CA) -> dict[str, np.ndarray]:
    """Chains of single atoms 10 Å apart, each chain ``distance`` beside the one before."""
    n = sum(lengths)
    positions, mask = np.zeros((n, 37, 3), np.float32), np.zeros((n, 37), np.float32)
    chain = np.repeat(np.arange(len(lengths)), lengths)
    positions[:, atom, 0] = 10.0 * np.concatenate([np.arange(length) for length in lengths])
    positions[:, atom, 1] = distance * chain
    mask[:, atom] = 1.0
    return {"atom_positions": positions, "atom_mask": mask, "chain_index": chain, "plddt": np.full(n, 90.0)}


def test_pairs_of_chains_add_up_to_what_the_whole_structure_has() -> None:
    rng = np.random.default_rng(0)
    positions = torch.from_numpy(rng.uniform(0, 25, (60, 37, 3)))
    mask = torch.from_numpy((rng.random((60, 37)) < 0.2).astype(np.float32))
    chain = torch.arange(60) // 20
    index = torch.arange(60)
    pairs, close = chain_clashes(positions, mask, chain)
    within = sum(
        count_clashes(positions[rows], mask[rows], index[rows], chain[rows])
        for rows in (slice(0, 20), slice(20, 40), slice(40, 60))
    )
    between = count_clashes(positions, mask, index, chain) - within
    assert pairs.triu().sum() == between > 10
    assert torch.equal(pairs, pairs.T)
    residue, slot = (mask > 0.5).nonzero(as_tuple=True)
    points = positions[residue, slot]
    near = (torch.cdist(points, points) < 1.1) & (chain[residue][:, None] != chain[residue])
    assert close.tolist() == [int(near[chain[residue] == number].any(1).sum()) for number in range(3)]
    assert close.sum() > 3


def test_distances_decide_what_is_counted() -> None:
    """Two carbons clash below 1.9 Å, and count for the rule below 1.1 Å; a bridge of sulphurs is none."""
    for distance, clashes, close in ((1.89, 3, 0), (1.91, 0, 0), (1.09, 3, 3), (1.11, 3, 0)):
        found = interface_scores(**strands(distance, 3, 5))
        assert found["clashes"] == found["pairs"]["A-B"]["clashes"] == clashes
        assert [found["chains"][name]["clashing_atoms"] for name in "AB"] == [close, close]
    assert interface_scores(**strands(1.5, 3, 5, atom=SG))["clashes"] == 0


@pytest.mark.parametrize(
    ("lengths", "rule"),
    [((4, 4), True), ((4, 7), True), ((4, 8), False), ((5, 300), True), ((0, 8), False)],
)
def test_more_than_half_of_a_chain_clashes(lengths: tuple[int, int], rule: bool) -> None:
    """So many atoms of the first chain, which has 8, and of the second."""
    touching, length = lengths
    case = strands(1.0, 8, length)
    case["atom_positions"][touching:8, CA, 1] = 50.0
    case["atom_positions"][8 + touching :, CA, 1] = 100.0
    assert interface_scores(**case)["has_clash"] is rule


@pytest.mark.parametrize(("touching", "rule"), [(100, False), (101, True)])
def test_more_than_a_hundred_atoms_of_a_large_chain_clash(touching: int, rule: bool) -> None:
    case = strands(1.0, 300, 300)
    case["atom_positions"][touching:300, CA, 1] = 50.0
    found = interface_scores(**case)
    assert found["chains"]["A"]["clashing_atoms"] == touching
    assert found["has_clash"] is rule


def test_a_single_chain_has_no_clashes_between_chains() -> None:
    found = interface_scores(**strands(1.0, 5))
    assert (found["clashes"], found["has_clash"]) == (None, None)


def test_clashes_stay_where_other_scores_would_be_false() -> None:
    found = without_scores(interface_scores(**strands(1.0, 5, 5)), "a reason")
    assert (found["pairs"]["A-B"]["clashes"], found["clashes"], found["has_clash"]) == (5, 5, True)
    assert found["pairs"]["A-B"]["pdockq"] is None


def test_a_prediction_whose_chains_lie_in_each_other_is_ranked_last() -> None:
    """Its confidence stays what the network says."""
    free = helix_prediction("free", 20, 20)
    positions = free.atom_positions.copy()
    positions[20:] = positions[:20] + np.float32(0.3)
    laid_over = helix_prediction("over", 20, 20, atom_positions=positions)
    assert free.interface_scores["clashes"] == 0
    assert laid_over.interface_scores["clashes"] > 100
    assert laid_over.ranking_confidence == free.ranking_confidence
    first, second = ranking_scores("auto", [listed_scores(free), listed_scores(laid_over)])
    assert second == pytest.approx(first - 100)
    assert laid_over.scores()["interfaces"]["has_clash"] is True
