"""The gradients of the backbone's energy are those of its definition, in float64 and by automatic differentiation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.structure.backbone_descent import HARD, backbone_points
from fastfold.evoformer.structure.backbone_energy import (
    BackboneEnergy,
    BackboneWeights,
    ChainTorsions,
    bonds,
    phi_and_psi,
)
from fastfold.evoformer.structure.ramachandran import RamachandranPotential
from fastfold.evoformer.structure.rigid_points import placed
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.backbone import torsion

SEQUENCE = "MKPGAWLGDVXPS"
BREAK = 6  #: The residue after a gap in the chain
LAST = 1  #: Padding at the end


def chain() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points of a coil near itself, types, numbers with a gap, and a mask with padding."""
    torch.manual_seed(3)
    aatype = torch.as_tensor(rc.sequence_to_aatype(SEQUENCE)).long()
    length = len(aatype)
    walk = 3.0 * torch.nn.functional.normalize(torch.randn(length, 3).double(), dim=-1)
    center = 0.8 * walk.cumsum(0)
    quaternion = torch.nn.functional.normalize(torch.randn(length, 4).double(), dim=-1)
    points = placed(torch.cat([quaternion, center], -1), backbone_points(aatype, center))
    index = torch.arange(length) + 5 * (torch.arange(length) >= BREAK)
    return points, aatype, index, torch.arange(length) < length - LAST


NONE = BackboneWeights(
    bond=0.0, angle=0.0, ca_ca=0.0, omega=0.0, ramachandran=0.0, hand=0.0, predicted=0.0, overlap=0.0
)
WEIGHTS = BackboneWeights(
    bond=3.0, angle=5.0, ca_ca=7.0, omega=11.0, ramachandran=13.0, hand=17.0, predicted=19.0, overlap=23.0
)


def definition(points: Tensor, weights: BackboneWeights, ramachandran: float = 1.0) -> Tensor:
    """Compute the energy residue by residue, as the documentation of its weights states it."""
    _, aatype, index, present = chain()
    predicted = angles()
    potential = RamachandranPotential(aatype, bonds(index, present), points)
    n, ca, c, cb = points.unbind(1)
    total = points.new_zeros(())
    last = len(points) - 1
    linked = [
        i < last and bool(index[i + 1] - index[i] == 1 and present[i + 1] and present[i])
        for i in range(last + 1)
    ]
    residues: list[dict[str, Tensor]] = []
    for i in range(last + 1):
        atoms = {"N": n[i], "CA": ca[i], "C": c[i]}
        if aatype[i] != rc.restype_order["G"]:
            atoms["CB"] = cb[i]
        if linked[i]:
            atoms["O"] = c[i] + 0.762 * (c[i] - ca[i]) + 0.896 * (c[i] - n[i + 1])
            for a, b, length, weight in (
                (c[i], n[i + 1], 1.329, weights.bond),
                (ca[i], n[i + 1], 2.425, weights.angle),
                (c[i], ca[i + 1], 2.435, weights.angle),
                (ca[i], ca[i + 1], rc.ca_ca_distance, weights.ca_ca),
            ):
                total = total + weight * ((a - b).norm() - length) ** 2
            omega = torch.deg2rad(torsion(ca[i], c[i], n[i + 1], ca[i + 1]))
            total = total + weights.omega * (1 + omega.cos())
        residues.append(atoms)
        if linked[i] and i > 0 and linked[i - 1]:
            phi = torch.deg2rad(torsion(c[i - 1], n[i], ca[i], c[i]))
            psi = torch.deg2rad(torsion(n[i], ca[i], c[i], n[i + 1]))
            every = torch.zeros(last + 1, 2).double().index_put((torch.tensor(i),), torch.stack([phi, psi]))
            total = total + ramachandran * weights.ramachandran * potential.energies(every)[i]
            off = 2 - (phi - predicted[i, 0]).cos() - (psi - predicted[i, 1]).cos()
            total = total + weights.predicted * off
            if aatype[i] != rc.restype_order["G"]:
                total = total + weights.hand * (1 + (phi - math.radians(100)).cos())
    near = {"N N": 2.9, "N O": 2.75, "O O": 2.9, "CA CA": 4.1, "C CA": 3.5, "CA CB": 3.9, "CB CB": 4.3}
    near |= {"C C": 3.4, "C CB": 3.5, "C O": 3.0}
    for i in range(last + 1):
        for j in range(i + 1, last + 1):
            if not (present[i] and present[j]) or index[j] - index[i] < 2 or (ca[i] - ca[j]).norm() >= 9.5:
                continue
            for a, x in residues[i].items():
                for b, y in residues[j].items():
                    limit = near.get(" ".join(sorted((a, b))), 3.1)
                    total = total + weights.overlap * (limit - (x - y).norm()).clamp(min=0) ** 2
    return total


def angles() -> Tensor:
    torch.manual_seed(4)
    return 2 * math.pi * torch.rand(len(SEQUENCE), 2).double() - math.pi


def energy(weights: BackboneWeights) -> BackboneEnergy:
    points, aatype, index, present = chain()
    potential = RamachandranPotential(aatype, bonds(index, present), points)
    return BackboneEnergy(aatype, index, present, potential=potential, predicted=angles(), weights=weights)


@pytest.mark.parametrize("term", [*BackboneWeights._fields, "all"])
def test_the_gradient_is_that_of_the_definition(term: str):
    weights = WEIGHTS if term == "all" else NONE._replace(**{term: 2.0})
    points = chain()[0].requires_grad_()
    (expected,) = torch.autograd.grad(definition(points, weights, 0.7), points)
    assert bool((expected != 0).any())
    found = energy(weights)
    found.list_overlaps(points.detach())
    torch.testing.assert_close(found.gradient(points.detach(), 0.7), expected, rtol=2e-4, atol=2e-3)


def test_padding_and_breaks_feel_nothing_of_their_neighbours():
    points, *_ = chain()
    found = energy(WEIGHTS._replace(overlap=0.0))
    found.list_overlaps(points)
    gradient = found.gradient(points)
    assert torch.equal(gradient[-LAST:], torch.zeros_like(gradient[-LAST:]))
    moved = points.clone()
    moved[BREAK:] += 2.0
    torch.testing.assert_close(found.gradient(moved)[:BREAK], gradient[:BREAK])


def test_overlaps_are_listed_before_they_happen():
    points, *_ = chain()
    found = energy(NONE._replace(overlap=1.0))
    found.list_overlaps(points)
    moved = points + 0.3 * torch.nn.functional.normalize(torch.randn_like(points[:, :1]), dim=-1)
    before = found.gradient(moved)
    found.list_overlaps(moved)
    torch.testing.assert_close(before, found.gradient(moved))


def test_forces_of_torsions_turn_and_move_nothing():
    """The gradient of any energy of torsions has no sum and no moment."""
    torch.manual_seed(5)
    points = 3 * torch.randn(20, 3).double()
    force = ChainTorsions.measure(points).forces(torch.randn(17).double())
    torch.testing.assert_close(force.sum(0), torch.zeros(3).double())
    torch.testing.assert_close(
        torch.linalg.cross(points, force).sum(0), torch.zeros(3).double(), rtol=0, atol=1e-5
    )


def test_torsions_go_to_their_residues():
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert phi_and_psi(rows).tolist() == [[3.0, 1.0], [3.0, 4.0], [6.0, 4.0]]


def test_points_that_coincide_have_finite_forces():
    points, *_ = chain()
    found = energy(HARD.weights)
    same = torch.zeros_like(points)
    found.list_overlaps(same)
    assert bool(found.gradient(same).isfinite().all())
