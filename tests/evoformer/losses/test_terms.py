"""Losses: gradients against finite differences, and the properties that their definitions promise."""

from __future__ import annotations

import pytest
import torch
from ml_collections import ConfigDict
from torch.autograd import gradcheck

from fastfold.evoformer.losses.fape import aligned_errors, backbone_fape, frame_aligned_point_error
from fastfold.evoformer.losses.side_chains import rename_ground_truth, torsion_losses
from fastfold.evoformer.losses.violation import distance_bounds, find_violations, violation_loss
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import lddt
from fastfold.protein.rigid import Rigid, quaternion_to_rotation
from tests.helpers.networks import oracle_config, oracle_features

BATCH = {key: value[-1] for key, value in oracle_features(dtype=torch.float64).items()}
STRUCTURE = oracle_config().model.heads.structure_module


def _frames(count: int, seed: int = 0) -> Rigid:
    generator = torch.Generator().manual_seed(seed)
    quaternion = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    quaternion = quaternion / quaternion.norm(dim=-1, keepdim=True)
    return Rigid(quaternion_to_rotation(quaternion), torch.randn(count, 3, generator=generator).double() * 5)


@pytest.mark.parametrize("paired", [False, True])
def test_fape_is_its_definition(paired: bool) -> None:
    """A mean over pairs, in plain loops, for two samples with different masks."""
    generator = torch.Generator().manual_seed(0)
    predicted, target = ([_frames(4, seed) for seed in seeds] for seeds in ((0, 1), (2, 3)))
    points, true = torch.randn(2, 2, 5, 3, generator=generator).double() * 4
    frames_mask = torch.tensor([[1.0, 1, 0, 1], [0, 1, 0, 1]]).double()
    points_mask = torch.tensor([[1.0, 0, 1, 1, 1], [1, 0, 1, 0, 1]]).double()
    pair_mask = (torch.rand(2, 4, 5, generator=generator) < 0.5).double()
    expected = torch.zeros(2).double()
    for b in range(2):
        errors = [
            min(((p.invert_apply(x) - t.invert_apply(y)).square().sum() + 1e-4).sqrt().item(), 6.0) / 10.0
            for f, (p, t) in enumerate(
                zip(*([r[b][i] for i in range(4)] for r in (predicted, target)), strict=True)
            )
            for k, (x, y) in enumerate(zip(points[b], true[b], strict=True))
            if frames_mask[b, f] * points_mask[b, k] * (pair_mask[b, f, k] if paired else 1)
        ]
        expected[b] = sum(errors) / (len(errors) + 1e-4)
    stacked = [
        Rigid(torch.stack([f.rotation for f in r]), torch.stack([f.translation for f in r]))
        for r in (predicted, target)
    ]
    found = frame_aligned_point_error(
        stacked[0],
        stacked[1],
        frames_mask,
        points,
        true,
        points_mask,
        length_scale=10.0,
        clamp_distance=6.0,
        pair_mask=pair_mask if paired else None,
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("clamp", [None, 3.0])
def test_fape_gradient(clamp: float | None) -> None:
    frames, target, points = _frames(4), _frames(4, 1), torch.randn(5, 3).double()
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()

    def fape(rotation: torch.Tensor, translation: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        return frame_aligned_point_error(
            Rigid(rotation, translation),
            target,
            mask,
            predicted,
            points,
            torch.ones(5).double(),
            length_scale=10.0,
            clamp_distance=clamp,
        )

    inputs = (frames.rotation, frames.translation, torch.randn(5, 3).double() * 3)
    assert gradcheck(fape, tuple(x.clone().requires_grad_() for x in inputs))


def test_fape_does_not_see_global_motion() -> None:
    frames, target, points = _frames(4), _frames(4, 1), torch.randn(6, 3).double()
    ones = torch.ones(4).double(), torch.ones(6).double()
    motion = _frames(1, 2)[0]
    moved = motion[None].compose(frames)

    def fape(predicted: Rigid, at: torch.Tensor) -> torch.Tensor:
        return frame_aligned_point_error(
            predicted, target, ones[0], at, points, ones[1], length_scale=10.0, clamp_distance=None
        )

    torch.testing.assert_close(fape(moved, motion[None].apply(points)), fape(frames, points))
    assert not torch.allclose(fape(frames, motion[None].apply(points)), fape(frames, points))


def test_backbone_fape_of_the_truth_is_its_floor() -> None:
    truth = BATCH["backbone_affine_tensor"][None]
    floor = backbone_fape({"traj": truth}, BATCH, STRUCTURE)
    assert floor.item() == pytest.approx(1e-4**0.5 / 10.0, rel=1e-3)
    worse = truth.clone()
    worse[..., 4:] += torch.randn_like(worse[..., 4:])
    assert backbone_fape({"traj": worse}, BATCH, STRUCTURE).item() > 10 * floor.item()


def test_unclamped_share_is_blended() -> None:
    far = BATCH["backbone_affine_tensor"][None].clone()
    far[..., 4:] *= 7.0
    fape = {
        share: backbone_fape(
            {"traj": far}, BATCH | {"use_clamped_fape": torch.tensor(share).double()}, STRUCTURE
        ).item()
        for share in (0.0, 0.25, 1.0)
    }
    assert fape[1.0] == backbone_fape({"traj": far}, BATCH, STRUCTURE).item()
    assert fape[0.25] == pytest.approx(0.25 * fape[1.0] + 0.75 * fape[0.0])
    assert fape[0.0] > fape[1.0]


def test_violation_gradient() -> None:
    torch.manual_seed(0)
    batch = {key: value[:4] for key, value in BATCH.items() if value.dim()}
    positions = BATCH["atom14_gt_positions"][:4] + 0.3 * torch.randn(4, 14, 3).double()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return violation_loss(find_violations(x, batch, STRUCTURE), batch)

    assert loss(positions) > 0
    assert gradcheck(loss, (positions.requires_grad_(),))


def test_violations_of_complexes_count_clashing_atoms_and_weigh_angles() -> None:
    """The mean is over clashing atoms, so that it does not fall with the size of a complex (Evans et al. 2021)."""
    torch.manual_seed(0)
    positions = BATCH["atom14_gt_positions"] + 0.2 * torch.randn_like(BATCH["atom14_gt_positions"])
    found = find_violations(positions, BATCH, STRUCTURE)
    between, within = found["between_residues"], found["within_residues"]
    overlap = between["clashes_per_atom_loss_sum"] + within["per_atom_loss_sum"]
    clashing = (overlap > 0).sum()
    assert 0 < clashing < BATCH["atom14_atom_exists"].sum()
    angles = between["angles_ca_c_n_loss_mean"] + between["angles_c_n_ca_loss_mean"]
    assert angles > 0
    paper = ConfigDict({"angle_weight": 0.3, "mean_of_clashing_atoms": True})
    expected = between["bonds_c_n_loss_mean"] + 0.3 * angles + overlap.sum() / clashing
    torch.testing.assert_close(violation_loss(found, BATCH, paper), expected)
    official = ConfigDict({"angle_weight": 1.0, "mean_of_clashing_atoms": False})
    assert violation_loss(found, BATCH, official) == violation_loss(found, BATCH)


def test_torsion_gradient_and_periodicity() -> None:
    torch.manual_seed(0)
    angles, raw = torch.randn(2, 28, 7, 2).double(), torch.randn(2, 28, 7, 2).double()

    def losses(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        structure = {"sidechains": {"angles_sin_cos": a, "unnormalized_angles_sin_cos": b}}
        found = torsion_losses(structure, BATCH)
        return found["chi_loss"] + found["angle_norm_loss"]

    assert gradcheck(losses, (angles.requires_grad_(), raw.requires_grad_()))


def test_renaming_undoes_a_flipped_ring() -> None:
    """Exchanging the names of symmetric atoms in the prediction exchanges them in the ground truth."""
    truth = BATCH["atom14_gt_positions"]
    order = torch.from_numpy(rc.restype_atom14_renaming)[BATCH["aatype"].long()].long()
    flipped = truth.gather(1, order[..., None].expand(-1, -1, 3))
    ambiguous = (BATCH["atom14_atom_is_ambiguous"] * BATCH["atom14_gt_exists"]).sum(-1) > 0
    assert ambiguous.any()
    assert not rename_ground_truth(truth, BATCH)["alt_naming_is_better"].any()
    found = rename_ground_truth(flipped, BATCH)
    assert torch.equal(found["alt_naming_is_better"] > 0, ambiguous)
    torch.testing.assert_close(found["renamed_atom14_gt_positions"], flipped)


def test_distance_bounds_are_symmetric_and_hold_ideal_geometry() -> None:
    lower, upper = distance_bounds(1.5, 12.0)
    assert (lower == lower.transpose(0, 2, 1)).all()
    assert (upper == upper.transpose(0, 2, 1)).all()
    n, ca, c = 0, 1, 2
    for i in range(20):
        assert lower[i, n, ca] < 1.46 < upper[i, n, ca]
        assert lower[i, n, c] < 2.46 < upper[i, n, c]
    assert not lower[20].any()


def test_own_frame_error_is_zero_only_for_exact_products() -> None:
    """5.0 is ten times a float32, the float32 nearest to 1.7 is not: the lowest bin ends at zero."""
    structure = {"final_affines": torch.zeros(2, 7)}
    structure["final_affines"][:, 0] = 1.0
    structure["final_affines"][0, 4], structure["final_affines"][1, 4] = 5.0, 1.7
    errors = aligned_errors(structure, {"backbone_affine_tensor": structure["final_affines"].clone()}, 10.0)
    assert errors[0, 0] == 0
    assert errors[1, 1] > 0


def test_lddt_of_hand_computed_points() -> None:
    """Three points on a line; the last is off by 1.5 Å, so each of its two distances scores one half."""
    reference = torch.tensor([[0.0, 0, 0], [4.0, 0, 0], [8.0, 0, 0]])
    predicted = reference.clone()
    predicted[2, 0] += 1.5
    ones = torch.ones(3)
    assert lddt(predicted, reference, ones).tolist() == pytest.approx([0.75, 0.75, 0.5])
    assert lddt(predicted, reference, ones, per_residue=False).item() == pytest.approx(2 / 3)
    assert lddt(predicted, reference, torch.tensor([1.0, 1.0, 0.0]))[:2].tolist() == pytest.approx([1.0, 1.0])
    assert lddt(predicted, reference, ones, cutoff=5.0).tolist() == pytest.approx([1.0, 0.75, 0.5])
