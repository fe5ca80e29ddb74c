"""The chain center-of-mass loss is its definition, in plain loops, and pushes chains apart that lie too near."""

from __future__ import annotations

import itertools
import math

import torch
from ml_collections import ConfigDict
from torch import Tensor
from torch.autograd import gradcheck

from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses.ca_atoms import ca_losses, chain_center_of_mass_loss
from fastfold.protein import residue_constants as rc

CONFIG = model_config("model_1_multimer_v3").model.heads.structure_module.chain_center_of_mass


def definition(predicted: Tensor, true: Tensor, mask: Tensor, chain: Tensor) -> float:
    """1 / (N (N - 1)) over all ordered pairs of N chains of min(1/20 (d_predicted - d_true + 4), 0)²."""

    def center(points: Tensor, name: int) -> list[float]:
        chosen = [points[i].tolist() for i in range(len(chain)) if int(chain[i]) == name and mask[i] > 0]
        return [sum(point[axis] for point in chosen) / len(chosen) for axis in range(3)]

    names = sorted({int(chain[i]) for i in range(len(chain)) if mask[i] > 0})
    total = 0.0
    for i, j in itertools.permutations(names, 2):
        d_predicted = math.dist(center(predicted, i), center(predicted, j))
        d_true = math.dist(center(true, i), center(true, j))
        total += min((d_predicted - d_true + 4) / 20, 0) ** 2
    return total / (len(names) * (len(names) - 1)) if len(names) > 1 else 0.0


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two samples of four chains, one of which is not resolved in the second sample; predictions are too compact."""
    generator = torch.Generator().manual_seed(0)
    chain = torch.tensor([3, 3, 3, 5, 5, 7, 7, 7, 7, 9])
    true = torch.randn(2, 10, 3, generator=generator).double() * 20
    predicted = true * torch.tensor([0.3, 0.7]).double()[:, None, None]
    predicted = predicted + torch.randn(2, 10, 3, generator=generator).double()
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]]).double()
    return predicted, true, mask, chain.expand(2, -1)


def test_it_is_its_definition() -> None:
    predicted, true, mask, chain = case()
    found = chain_center_of_mass_loss(predicted, true, mask, chain, CONFIG)
    expected = [definition(*(x[b] for x in (predicted, true, mask, chain))) for b in range(2)]
    assert min(expected) > 0.01
    torch.testing.assert_close(found, torch.tensor(expected).double(), atol=1e-7, rtol=1e-6)


def test_four_angstroms_nearer_cost_nothing() -> None:
    """Nor does any distance that is too large; ten nearer cost (6 / 20)², and the gradient separates the chains."""
    true = torch.tensor([[0.0, 0, 0], [30.0, 0, 0]]).double()
    mask, chain = torch.ones(2).double(), torch.tensor([1, 2])
    for distance, expected in ((26.0, 0.0), (90.0, 0.0), (30.0, 0.0), (20.0, 0.09), (25.0, 0.0025)):
        predicted = torch.tensor([[0.0, 0, 0], [distance, 0, 0]]).double().requires_grad_()
        loss = chain_center_of_mass_loss(predicted, true, mask, chain, CONFIG)
        assert math.isclose(loss.item(), expected, abs_tol=1e-8)
        loss.backward()
        assert predicted.grad is not None
        assert (float(predicted.grad[1, 0]) < 0) == (expected > 0)


def test_gradient() -> None:
    predicted, true, mask, chain = case()

    def loss(x: Tensor) -> Tensor:
        return chain_center_of_mass_loss(x, true, mask, chain, CONFIG)

    assert gradcheck(loss, predicted.requires_grad_())
    collapsed = torch.zeros_like(true).requires_grad_()
    loss(collapsed).sum().backward()
    assert collapsed.grad is not None
    assert torch.isfinite(collapsed.grad).all()


def test_one_chain_has_none() -> None:
    predicted, true, mask, chain = case()
    alone = chain_center_of_mass_loss(predicted, true, mask, torch.ones_like(chain), CONFIG)
    nothing = chain_center_of_mass_loss(predicted, true, 0 * mask, chain, CONFIG)
    assert not alone.any()
    assert not nothing.any()


def test_of_a_structure_it_takes_the_alpha_carbons() -> None:
    predicted, true, mask, chain = case()
    atoms, labels = torch.full((2, 10, 37, 3), 1e3).double(), torch.full((2, 10, 37, 3), -1e3).double()
    exists = torch.ones(2, 10, 37).double()
    ca = rc.atom_order["CA"]
    atoms[..., ca, :], labels[..., ca, :], exists[..., ca] = predicted, true, mask
    batch = {"all_atom_positions": labels, "all_atom_mask": exists, "asym_id": chain}
    tree = ConfigDict({"chain_center_of_mass": {"tolerance": 2.0, "length_scale": 10.0}})
    config = tree.chain_center_of_mass
    torch.testing.assert_close(
        ca_losses({"final_atom_positions": atoms}, batch, tree)["chain_center_of_mass"][-1],
        chain_center_of_mass_loss(predicted, true, mask, chain, config),
    )
