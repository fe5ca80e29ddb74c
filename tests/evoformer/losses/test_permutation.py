"""Chains of one sequence get the labels of the copy that fits: exactly undone permutations, gaps, crops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.evoformer.losses.permutation import match_chains, permute_labels, split_chains
from fastfold.protein import residue_constants as rc

CA = rc.atom_order["CA"]
Labels = dict[str, torch.Tensor]


def _assembly(entities: list[int], length: int = 12, seed: int = 0) -> Labels:
    """Chains with the shape of their sequence, each at a place of its own; no symmetry relates them."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(max(entities), length, 3, generator=generator).double()
    folds = (3.8 * steps / steps.norm(dim=-1, keepdim=True)).cumsum(1)
    positions, sym = [], []
    count: dict[int, int] = {}
    for chain, entity in enumerate(entities):
        turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator).double())
        turn = turn * torch.linalg.det(turn)
        place = torch.tensor([25.0 * chain, 9.0 * chain**2, 7.0 * (chain % 2)]).double()
        positions.append(folds[entity - 1] @ turn.mT + place)
        count[entity] = count.get(entity, 0) + 1
        sym.append(count[entity])
    ca = torch.cat(positions)
    atoms = torch.zeros(len(ca), 37, 3).double()
    atoms[:, CA] = ca
    mask = torch.zeros(len(ca), 37).double()
    mask[:, CA] = 1.0
    each = torch.tensor([length] * len(entities))
    return {
        "asym_id": (torch.arange(len(entities)) + 1).repeat_interleave(each),
        "entity_id": torch.tensor(entities).repeat_interleave(each),
        "sym_id": torch.tensor(sym).repeat_interleave(each),
        "residue_index": torch.arange(length).repeat(len(entities)),
        "all_atom_positions": atoms,
        "all_atom_mask": mask,
        "row": torch.arange(len(ca)),
    }


def _prediction(labels: Labels, order: list[int], noise: float = 0.5, seed: int = 1) -> torch.Tensor:
    """A prediction whose k-th chain is the experiment's chain ``order[k]``, somewhere else in space."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator).double())
    ca = labels["all_atom_positions"][:, CA]
    moved = torch.cat([ca[labels["asym_id"] == chain] for chain in order])
    return (
        moved @ (turn * torch.linalg.det(turn)).mT
        + 40.0
        + noise * torch.randn(moved.shape, generator=generator).double()
    )


def _ids(labels: Labels) -> tuple[Any, Any, Any]:
    return labels["asym_id"], labels["entity_id"], labels["residue_index"]


def _matched(labels: Labels, predicted: torch.Tensor) -> list[int]:
    """The experiment's chain of each predicted one, counted from 1."""
    found = match_chains(predicted, *_ids(labels), split_chains(labels, labels["asym_id"]))
    return [found[k] + 1 for k in sorted(found)]


@pytest.mark.parametrize(
    ("entities", "order"),
    [
        ([1], [1]),
        ([1, 1], [1, 2]),
        ([1, 1], [2, 1]),
        ([1, 1, 1, 1], [3, 1, 4, 2]),
        ([1, 2], [1, 2]),
        ([1, 1, 2], [2, 1, 3]),
        ([1, 2, 1, 2], [3, 2, 1, 4]),
        ([1, 2, 1, 2, 1], [5, 4, 1, 2, 3]),
    ],
)
def test_permutations_are_undone(entities: list[int], order: list[int]) -> None:
    """Homomers and heteromers; chains of another sequence are never exchanged."""
    labels = _assembly(entities)
    predicted = _prediction(labels, order)
    assert _matched(labels, predicted) == order
    permuted = permute_labels(predicted, *_ids(labels), split_chains(labels, labels["asym_id"]))
    expected = torch.cat([labels["row"][labels["asym_id"] == chain] for chain in order])
    assert torch.equal(permuted["row"], expected)
    assert torch.equal(permuted["all_atom_positions"], labels["all_atom_positions"][expected])
    assert set(permuted) == {"row", "all_atom_positions", "all_atom_mask"}


@settings(max_examples=25, deadline=None)
@given(st.permutations([1, 2, 3, 4, 5]), st.integers(0, 1000))
def test_any_order_of_a_homomer_is_found(order: list[int], seed: int) -> None:
    labels = _assembly([1] * 5, seed=seed)
    assert _matched(labels, _prediction(labels, order, seed=seed)) == order


def test_a_perfect_symmetry_stays_as_given() -> None:
    """All rotations of a symmetric ring fit alike; without a reason nothing is exchanged."""
    labels = _assembly([1, 1, 1])
    ca = labels["all_atom_positions"][:12, CA] + torch.tensor([30.0, 0, 0]).double()
    angle = torch.arange(3).double() * 2 * torch.pi / 3
    zero, one = torch.zeros(3).double(), torch.ones(3).double()
    c, s = angle.cos(), angle.sin()
    turn = torch.stack([c, -s, zero, s, c, zero, zero, zero, one], -1).unflatten(-1, (3, 3))
    labels["all_atom_positions"][:, CA] = (ca @ turn.mT).flatten(0, 1)
    assert _matched(labels, _prediction(labels, [1, 2, 3], noise=0.0)) == [1, 2, 3]
    for seed in range(5):
        assert _matched(labels, _prediction(labels, [2, 3, 1], noise=1e-4, seed=seed)) == [1, 2, 3]
    assert _matched(labels, _prediction(labels, [2, 1, 3], noise=0.0)) != [1, 2, 3]


def test_missing_residues_do_not_matter() -> None:
    """Each copy lacks other residues; what is left decides, and the masks come along."""
    labels = _assembly([1, 1, 1])
    predicted = _prediction(labels, [3, 1, 2])
    for chain, gap in ((1, slice(0, 5)), (2, slice(7, 12)), (3, slice(4, 6))):
        start = 12 * (chain - 1)
        rows = torch.arange(start, start + 12)[gap]
        labels["all_atom_mask"][rows] = 0.0
        labels["all_atom_positions"][rows] = torch.nan
    assert _matched(labels, predicted) == [3, 1, 2]
    permuted = permute_labels(predicted, *_ids(labels), split_chains(labels, labels["asym_id"]))
    assert (
        permuted["all_atom_mask"][:, CA].tolist()
        == [1] * 4 + [0] * 2 + [1] * 6 + [0] * 5 + [1] * 14 + [0] * 5
    )


def test_a_copy_that_nobody_resolved_goes_to_the_chain_that_is_left() -> None:
    labels = _assembly([1, 1, 1])
    predicted = _prediction(labels, [2, 3, 1])
    labels["all_atom_mask"][24:] = 0.0
    assert _matched(labels, predicted) == [2, 3, 1]


def test_nothing_resolved_leaves_the_order() -> None:
    labels = _assembly([1, 1, 2])
    labels["all_atom_mask"][:] = 0.0
    assert _matched(labels, _prediction(labels, [2, 1, 3])) == [1, 2, 3]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_prediction_that_is_not_finite_leaves_the_order(number: float) -> None:
    """The loss then says what is wrong; the step is skipped instead of ending the run."""
    labels = _assembly([1, 1, 2])
    predicted = _prediction(labels, [2, 1, 3])
    assert _matched(labels, predicted) == [2, 1, 3]
    predicted[4, 1] = number
    assert _matched(labels, predicted) == [1, 2, 3]


def test_crops_take_their_residues_from_whole_chains() -> None:
    """Different residues of each chain are in the crop, and padding follows."""
    labels = _assembly([1, 1, 2])
    predicted = _prediction(labels, [2, 1, 3])
    keep = torch.cat([torch.arange(2, 9), torch.arange(17, 24), torch.arange(24, 30)])
    asym, entity, index = (torch.cat([x[keep], torch.zeros(3, dtype=x.dtype)]) for x in _ids(labels))
    padded = torch.cat([predicted[keep], torch.zeros(3, 3).double()])
    permuted = permute_labels(padded, asym, entity, index, split_chains(labels, labels["asym_id"]))
    expected = [*range(14, 21), *range(5, 12), *range(24, 30)]
    assert permuted["row"].tolist() == [*expected, 0, 0, 0]
    assert permuted["all_atom_mask"][:, CA].tolist() == [1.0] * 20 + [0.0] * 3


def test_a_crop_of_some_chains_may_be_any_of_them() -> None:
    """The crop holds two of four copies; the prediction has put them where the last two are."""
    labels = _assembly([1, 1, 1, 1])
    predicted = _prediction(labels, [4, 3, 1, 2])
    keep = labels["asym_id"] <= 2
    asym, entity, index = (x[keep] for x in _ids(labels))
    found = match_chains(predicted[keep], asym, entity, index, split_chains(labels, labels["asym_id"]))
    assert found == {1: 3, 2: 2}


def test_residues_that_a_chain_lacks_have_zeros() -> None:
    """The first copy's labels end early; the second prediction is of it."""
    labels = _assembly([1, 1])
    predicted = _prediction(labels, [2, 1])
    whole = split_chains(labels, labels["asym_id"])
    chains = [{key: value[2:9] for key, value in whole[0].items()}, whole[1]]
    permuted = permute_labels(predicted, *_ids(labels), chains)
    assert permuted["row"].tolist() == [*range(12, 24), 0, 0, *range(2, 9), 0, 0, 0]
    assert permuted["all_atom_mask"][12:, CA].tolist() == [0.0] * 2 + [1.0] * 7 + [0.0] * 3


def test_a_chain_without_labels_has_zeros() -> None:
    labels = _assembly([1, 2])
    chains = split_chains(labels, labels["asym_id"])[:1]
    permuted = permute_labels(_prediction(labels, [1, 2]), *_ids(labels), chains)
    assert permuted["all_atom_mask"][:, CA].tolist() == [1.0] * 12 + [0.0] * 12


def test_half_precision_and_gradients() -> None:
    """Labels do not depend on the prediction by gradient, and bfloat16 positions are good enough."""
    labels = _assembly([1, 1])
    predicted = _prediction(labels, [2, 1]).bfloat16().requires_grad_()
    permuted = permute_labels(predicted, *_ids(labels), split_chains(labels, labels["asym_id"]))
    assert permuted["row"].tolist() == [*range(12, 24), *range(12)]
    assert not permuted["all_atom_positions"].requires_grad
