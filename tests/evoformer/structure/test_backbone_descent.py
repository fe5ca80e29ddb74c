"""The last stage of the descent gives a fold the backbone of a protein, and keeps its distances."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.structure import backbone_descent
from fastfold.evoformer.structure.backbone_descent import (
    RADIUS_WEIGHT,
    RadiusSpring,
    backbone_points,
    build_backbone,
)
from fastfold.evoformer.structure.distogram_potential import Distances
from fastfold.evoformer.structure.rigid_points import placed
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.backbone import backbone_figures, measure_backbone
from tests.evoformer.structure.test_distogram_descent import EDGES, beta, certain, helix

LENGTH, STEPS = 18, 40
ALANINES = torch.full((LENGTH,), rc.restype_order["A"])
PREDICTED = torch.deg2rad(torch.tensor([-63.0, -42.0])).expand(LENGTH, 2)
MIRROR = torch.tensor([1.0, 1.0, -1.0])


def distances(logits: Tensor, index: Tensor, present: Tensor) -> Distances:
    found = Distances.from_logits(logits, EDGES, index, present, 0, lambda x: x)
    found.add_expected_scores(0.8, 15.0, 40.0)
    return found


def run(
    affines: Tensor,
    logits: Tensor,
    *,
    index: Tensor | None = None,
    present: Tensor | None = None,
    aatype: Tensor | None = None,
    steps: int = STEPS,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    length = len(affines)
    index = torch.arange(length) if index is None else index
    present = torch.ones(length).bool() if present is None else present
    predicted = torch.zeros(length, 2)
    predicted[: len(PREDICTED)] = PREDICTED[:length]
    with torch.no_grad():
        return build_backbone(
            affines,
            distances(logits, index, present),
            aatype=ALANINES.new_full((length,), int(ALANINES[0])) if aatype is None else aatype,
            residue_index=index,
            present=present,
            predicted=predicted,
            steps=steps,
            sum_over_ranks=total,
        )


def figures(affines: Tensor, index: Tensor | None = None) -> dict[str, float]:
    length = len(affines)
    points = placed(affines, backbone_points(ALANINES[:1].expand(length), affines))
    positions, mask = torch.zeros(length, 37, 3), torch.zeros(length, 37)
    slots = [rc.atom_order[name] for name in ("N", "CA", "C")]
    positions[:, slots], mask[:, slots] = points[:, :3], 1.0
    index = torch.arange(length) if index is None else index
    return backbone_figures(measure_backbone(positions, mask, index, 0 * index), ALANINES[:1].expand(length))


def left_handed() -> Tensor:
    """Return the mirror image of a helix, with frames that know nothing of it."""
    found = helix(LENGTH)
    found[:, 4:] *= MIRROR
    found[:, :4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    return found


def test_a_helix_of_the_wrong_hand_becomes_one_of_the_right_hand():
    start = left_handed()
    moved = run(start, certain(beta(helix(LENGTH))), steps=80)
    before, after = figures(start), figures(moved)
    assert before["c_n_near"] < 0.2
    assert after["phi_positive"] == 0.0
    assert after["alpha_beta"] > 0.9
    assert after["omega_off_planar"] == 0.0
    assert after["c_n_near"] == 1.0
    assert after["ca_ca"] == pytest.approx(3.80, abs=0.03)
    wanted, found = (torch.cdist(x, x) for x in (start[:, 4:], moved[:, 4:]))
    assert float((wanted - found).abs().mean()) < 0.7


def test_breaks_have_no_bond_and_padding_stays():
    start, cut, pad = left_handed(), 9, 3
    logits = certain(beta(helix(LENGTH)))
    index = torch.arange(LENGTH) + 100 * (torch.arange(LENGTH) >= cut)
    padded = torch.cat([start, torch.tensor([[1.0, 0, 0, 0, 5.0, 5.0, 5.0]]).expand(pad, 7)])
    wide = torch.zeros(LENGTH + pad, LENGTH + pad, 64)
    wide[:LENGTH, :LENGTH] = logits
    present = torch.arange(LENGTH + pad) < LENGTH
    longer = torch.cat([index, index[-1] + 1 + torch.arange(pad)])
    moved = run(padded, wide, index=longer, present=present)
    assert torch.equal(moved[LENGTH:], padded[LENGTH:])
    shape = backbone_points(ALANINES, start)
    alone = run(start, logits, index=index)
    torch.testing.assert_close(placed(moved[:LENGTH], shape), placed(alone, shape), rtol=0, atol=1e-3)
    whole = run(start, logits)
    assert not torch.allclose(moved[cut - 2 : cut + 2], whole[cut - 2 : cut + 2], atol=1e-2)
    assert figures(moved[:LENGTH], index)["c_n_near"] > 0.8


@pytest.mark.parametrize("sequence", ["G", "AG", "XX", "PGX", "AAAA"])
def test_short_chains_of_any_residues_have_finite_frames(sequence: str):
    length = len(sequence)
    start = helix(length)
    aatype = torch.as_tensor(rc.sequence_to_aatype(sequence)).long()
    for affines in (start, 0 * start + torch.tensor([1.0, 0, 0, 0, 0, 0, 0])):
        moved = run(affines, torch.zeros(length, length, 64), aatype=aatype, steps=8)
        assert moved.shape == affines.shape
        assert bool(moved.isfinite().all())
        torch.testing.assert_close(moved[:, :4].norm(dim=-1), torch.ones(length))


def test_glycine_keeps_a_hand_that_others_lose():
    """Only glycines of a left-handed helix have phi above 0 in the end."""
    start, logits = left_handed(), torch.zeros(LENGTH, LENGTH, 64)
    glycines = torch.full((LENGTH,), rc.restype_order["G"])
    left = PREDICTED * -1
    with torch.no_grad():
        moved = build_backbone(
            start,
            distances(logits, torch.arange(LENGTH), torch.ones(LENGTH).bool()),
            aatype=glycines,
            residue_index=torch.arange(LENGTH),
            present=torch.ones(LENGTH).bool(),
            predicted=left,
            steps=STEPS,
            sum_over_ranks=lambda x: x,
        )
    assert figures(moved)["phi_positive"] > 0.9
    assert figures(run(start, logits))["phi_positive"] < 0.1


def test_forces_of_other_processes_count():
    """Twice the forces are those of twice the pairs."""
    start, logits = left_handed(), certain(beta(helix(LENGTH)))
    once, twice = run(start, logits, steps=12), run(start, logits, steps=12, total=lambda x: 2 * x)
    none = run(start, logits, steps=12, total=lambda x: 0 * x)
    assert not torch.allclose(once, twice, atol=1e-3)
    assert not torch.allclose(once, none, atol=1e-3)


def test_the_radius_of_the_start_is_kept():
    """The spring is the derivative of its energy, and padding takes no part."""
    torch.manual_seed(0)
    present = torch.arange(7) < 5
    start = torch.randn(7, 3).double()
    spring = RadiusSpring(start, present)
    assert float(spring.forces(start).abs().max()) == 0.0
    moved = (1.3 * start).requires_grad_()
    radii = [(x[present] - x[present].mean(0)).square().sum(-1).mean().sqrt() for x in (start, moved)]
    energy = int(present.sum()) * RADIUS_WEIGHT / 2 * (radii[1] - radii[0]).square()
    expected = torch.autograd.grad(energy, moved)[0]
    torch.testing.assert_close(
        spring.forces(moved.detach())[present], expected[present], rtol=1e-5, atol=1e-5
    )
    far = torch.where(present[:, None], start, start + 100.0)
    torch.testing.assert_close(
        RadiusSpring(far, present).forces(moved.detach())[:5], expected[:5], rtol=1e-5, atol=1e-5
    )


def test_a_fold_without_known_distances_keeps_its_radius(monkeypatch: pytest.MonkeyPatch):
    def radius(frames: Tensor) -> float:
        center = frames[:, 4:]
        return float((center - center.mean(0)).square().sum(-1).mean().sqrt())

    start = helix(LENGTH)
    start[:, 4:] *= 1.2
    none = torch.zeros(LENGTH, LENGTH, 64)
    kept = abs(radius(run(start, none)) / radius(start) - 1)
    monkeypatch.setattr(backbone_descent, "RADIUS_WEIGHT", 0.0)
    free = abs(radius(run(start, none)) / radius(start) - 1)
    assert kept < 0.7 * free


def test_types_have_their_own_ideal_geometry():
    points = backbone_points(torch.as_tensor(rc.sequence_to_aatype("AGPX")).long(), torch.zeros(()))
    expected = torch.as_tensor(rc.restype_atom14_rigid_group_positions)[:, [0, 1, 2, 4]].float()
    assert torch.equal(points[2], expected[rc.restype_order["P"]])
    assert torch.equal(points[3], points[0])
    assert torch.equal(points[1, 3], points[1, 1])
    assert math.isclose(float((points[0, 1] - points[0, 2]).norm()), 1.526, abs_tol=2e-3)
