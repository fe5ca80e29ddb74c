"""The CA trace loss is its definition, in plain loops, and a collapsed structure is expensive."""

from __future__ import annotations

import math

import pytest
import torch
from ml_collections import ConfigDict
from torch import Tensor
from torch.autograd import gradcheck

from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses.ca_atoms import ca_losses, ca_trace_losses
from fastfold.protein import residue_constants as rc

CONFIG = model_config("mini").model.heads.structure_module.ca_trace
LIMIT = CONFIG.overlap_distance


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two samples of nine residues: some not resolved, one gap in the numbers."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(2, 9, 3, generator=generator).double() * 6
    predicted = torch.randn(2, 9, 3, generator=generator).double() * 2
    mask = torch.ones(2, 9).double()
    mask[0, 2] = mask[1, 5] = mask[1, 6] = 0
    index = torch.tensor([1, 2, 3, 4, 9, 10, 11, 12, 13]).expand(2, 9)
    return predicted, true, mask, index


def definition(predicted: Tensor, true: Tensor, mask: Tensor, index: Tensor) -> dict[str, float]:
    kept = [i for i in range(len(mask)) if mask[i]]
    overlap, bonds = 0.0, []
    for i in kept:
        for j in kept:
            distance, apart = (
                math.dist(predicted[i].tolist(), predicted[j].tolist()),
                int(index[j] - index[i]),
            )
            if abs(apart) > 2:
                overlap += max(LIMIT - distance, 0) ** 2
            if j == i + 1 and apart == 1:
                error = abs(distance - 3.8)
                bonds.append(error**2 if error < 1 else 2 * error - 1)

    def radius(points: Tensor) -> float:
        chosen = points[kept]
        return float((chosen - chosen.mean(0)).square().sum(-1).mean().sqrt())

    return {
        "overlap": overlap / len(kept),
        "bond": sum(bonds) / len(bonds),
        "radius": math.log(radius(predicted) / radius(true)) ** 2,
    }


def test_it_is_its_definition() -> None:
    predicted, true, mask, index = case()
    found = ca_trace_losses(predicted, true, mask, index, overlap_distance=LIMIT)
    for b in range(2):
        expected = definition(predicted[b], true[b], mask[b], index[b])
        assert {name: float(x[b]) for name, x in found.items()} == pytest.approx(expected, abs=1e-5)


def test_residues_that_are_not_resolved_do_not_count() -> None:
    predicted, true, mask, index = case()
    found = ca_trace_losses(predicted, true, mask, index, overlap_distance=LIMIT)
    moved = ca_trace_losses(
        predicted + 9 * (1 - mask[..., None]),
        true - 7 * (1 - mask[..., None]),
        mask,
        index,
        overlap_distance=LIMIT,
    )
    torch.testing.assert_close(moved, found)


def test_a_ball_is_expensive_and_the_experiment_is_not() -> None:
    at = torch.arange(30.0).double()
    helix = torch.stack([2.3 * torch.cos(1.745 * at), 2.3 * torch.sin(1.745 * at), 1.5 * at], -1)
    mask, index = torch.ones(30).double(), torch.arange(30)
    right = ca_trace_losses(helix, helix, mask, index, overlap_distance=LIMIT)
    ball = ca_trace_losses(0.3 * helix, helix, mask, index, overlap_distance=LIMIT)
    assert all(float(x) < 0.01 for x in right.values()), right
    assert all(float(x) > 1.0 for x in ball.values()), ball


def test_every_layer_of_a_structure_has_its_loss() -> None:
    predicted, true, mask, index = case()
    layers = torch.stack([predicted, true])
    positions, resolved = torch.zeros(2, 9, 37, 3).double(), torch.zeros(2, 9, 37).double()
    positions[..., rc.atom_order["CA"], :], resolved[..., rc.atom_order["CA"]] = true, mask
    found = ca_losses(
        {"traj": torch.cat([torch.zeros(2, 2, 9, 4).double(), layers], -1)},
        {"all_atom_positions": positions, "all_atom_mask": resolved, "residue_index": index},
        ConfigDict({"ca_trace": CONFIG}),
    )["ca_trace"]
    for layer, x in zip(found, layers, strict=True):
        terms = ca_trace_losses(x, true, mask, index, overlap_distance=LIMIT)
        torch.testing.assert_close(layer, sum(CONFIG[name] * value for name, value in terms.items()))


def test_gradient() -> None:
    predicted, true, mask, index = case()

    def total(x: Tensor) -> Tensor:
        return sum(ca_trace_losses(x, true, mask, index, overlap_distance=LIMIT).values(), torch.zeros(2))

    assert gradcheck(total, predicted.requires_grad_())
    collapsed = torch.zeros_like(true).requires_grad_()
    total(collapsed).sum().backward()
    assert collapsed.grad is not None
    assert torch.isfinite(collapsed.grad).all()


def test_nothing_resolved_is_no_loss() -> None:
    predicted, true, mask, index = case()
    for x in ca_trace_losses(predicted, true, 0 * mask, index, overlap_distance=LIMIT).values():
        torch.testing.assert_close(x, torch.zeros(2).double())
