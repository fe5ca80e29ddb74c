"""The smooth lDDT loss is its definition, in plain loops, and does not pull what is unsure to the middle."""

from __future__ import annotations

import math

import torch
from ml_collections import ConfigDict
from torch import Tensor
from torch.autograd import gradcheck

from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses.ca_atoms import ca_losses, smooth_lddt_loss
from fastfold.protein import residue_constants as rc

CONFIG = model_config("mini").model.heads.structure_module.smooth_lddt


def definition(predicted: Tensor, true: Tensor, mask: Tensor, cutoff: float) -> float:
    """Algorithm 27 of AlphaFold 3, pair by pair."""
    total, count = 0.0, 0
    for i in range(len(mask)):
        for j in range(len(mask)):
            distance = math.dist(true[i].tolist(), true[j].tolist())
            if i == j or not mask[i] or not mask[j] or distance >= cutoff:
                continue
            error = abs(distance - math.dist(predicted[i].tolist(), predicted[j].tolist()))
            total += sum(1 / (1 + math.exp(error - t)) for t in (0.5, 1, 2, 4)) / 4
            count += 1
    return 1 - total / count


def case() -> tuple[Tensor, Tensor, Tensor]:
    """Two samples of nine atoms, of which some are not resolved; some pairs lie beyond 15 Å."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(2, 9, 3, generator=generator).double() * 8
    predicted = true + torch.randn(2, 9, 3, generator=generator).double() * 3
    mask = torch.ones(2, 9).double()
    mask[0, 2] = mask[1, 5] = mask[1, 6] = 0
    return predicted, true, mask


def test_it_is_its_definition() -> None:
    predicted, true, mask = case()
    found = smooth_lddt_loss(predicted, true, mask, cutoff=CONFIG.cutoff)
    expected = [definition(predicted[b], true[b], mask[b], CONFIG.cutoff) for b in range(2)]
    torch.testing.assert_close(found, torch.tensor(expected).double(), atol=1e-6, rtol=1e-6)
    moved = smooth_lddt_loss(
        predicted * (1 - mask[..., None]) * 9 + predicted, true, mask, cutoff=CONFIG.cutoff
    )
    torch.testing.assert_close(moved, found)


def test_every_layer_of_a_structure_has_its_loss() -> None:
    predicted, true, mask = case()
    layers = torch.stack([predicted, true])
    positions, resolved = torch.zeros(2, 9, 37, 3).double(), torch.zeros(2, 9, 37).double()
    positions[..., rc.atom_order["CA"], :], resolved[..., rc.atom_order["CA"]] = true, mask
    found = ca_losses(
        {"traj": torch.cat([torch.zeros(2, 2, 9, 4).double(), layers], -1)},
        {"all_atom_positions": positions, "all_atom_mask": resolved},
        ConfigDict({"smooth_lddt": CONFIG}),
    )["smooth_lddt"]
    for layer, x in zip(found, layers, strict=True):
        torch.testing.assert_close(layer, smooth_lddt_loss(x, true, mask, cutoff=CONFIG.cutoff))
    assert (found[1] < found[0]).all()


def test_one_of_two_places_is_better_than_the_middle() -> None:
    """What FAPE's mean does not say: an atom is as often at 4 Å as at 14 Å of another."""
    mask, places = torch.ones(2).double(), (4.0, 14.0)

    def expected(distance: float) -> float:
        predicted = torch.tensor([[0.0, 0, 0], [distance, 0, 0]]).double()
        truths = [torch.tensor([[0.0, 0, 0], [x, 0, 0]]).double() for x in places]
        return sum(float(smooth_lddt_loss(predicted, true, mask, cutoff=15.0)) for true in truths) / 2

    assert max(expected(x) for x in places) < expected(9.0)


def test_gradient() -> None:
    predicted, true, mask = case()
    assert gradcheck(lambda x: smooth_lddt_loss(x, true, mask, cutoff=15.0), predicted.requires_grad_())
    collapsed = torch.zeros_like(true).requires_grad_()
    smooth_lddt_loss(collapsed, true, mask, cutoff=15.0).sum().backward()
    assert collapsed.grad is not None
    assert torch.isfinite(collapsed.grad).all()


def test_no_pair_is_no_loss() -> None:
    predicted, true, mask = case()
    torch.testing.assert_close(
        smooth_lddt_loss(predicted, true, 0 * mask, cutoff=15.0), torch.zeros(2).double()
    )
