"""Rigid transforms and torsion angles."""

from __future__ import annotations

import math

import pytest
import torch

from fastfold.protein import residue_constants as rc
from fastfold.protein import rigid
from fastfold.protein.all_atom import (
    atom14_to_atom37,
    atom37_to_torsion_angles,
    chi_angles,
    frames_to_atom14,
    torsion_angles_to_frames,
)
from fastfold.protein.rigid import (
    Rigid,
    quaternion_to_rotation,
    rotation_to_quaternion,
    update_quaternion,
)

torch.manual_seed(0)
QUATERNIONS = torch.nn.functional.normalize(torch.randn(20, 4).double(), dim=-1)
FRAMES = Rigid(quaternion_to_rotation(QUATERNIONS), torch.randn(20, 3).double() * 10)


def test_rotations_are_proper() -> None:
    r = FRAMES.rotation
    torch.testing.assert_close(r @ r.transpose(-1, -2), torch.eye(3).double().expand(20, 3, 3))
    torch.testing.assert_close(torch.linalg.det(r), torch.ones(20).double())


def test_inverse_and_composition() -> None:
    points, other = torch.randn(20, 3).double(), FRAMES[torch.arange(19, -1, -1)]
    torch.testing.assert_close(FRAMES.invert_apply(FRAMES.apply(points)), points)
    torch.testing.assert_close(FRAMES.compose(other).apply(points), FRAMES.apply(other.apply(points)))


def test_quaternion_round_trip_up_to_sign() -> None:
    back = rotation_to_quaternion(FRAMES.rotation)
    torch.testing.assert_close((back * QUATERNIONS).sum(-1).abs(), torch.ones(20).double())


def test_backbone_update_multiplies_rotations() -> None:
    vector = torch.randn(20, 3).double() * 0.3
    step = torch.nn.functional.normalize(torch.cat([torch.ones(20, 1).double(), vector], -1), dim=-1)
    updated = quaternion_to_rotation(update_quaternion(QUATERNIONS, vector))
    torch.testing.assert_close(updated, FRAMES.rotation @ quaternion_to_rotation(step))


def test_frame_from_three_points() -> None:
    frame = Rigid.from_three_points(
        torch.tensor([-2.0, 0, 0]), torch.tensor([1.0, 0, 0]), torch.tensor([3.0, 5.0, 0])
    )
    torch.testing.assert_close(frame.rotation, torch.eye(3))
    torch.testing.assert_close(frame.translation, torch.tensor([1.0, 0, 0]))


def test_atoms_built_from_torsions_have_these_torsions() -> None:
    """All twenty residues: angles to atoms and back, by both networks' formulas."""
    aatype = torch.arange(20)
    angles = (torch.rand(20, 7).double() * 2 - 1) * math.pi
    sin_cos = torch.stack([angles.sin(), angles.cos()], -1)
    atom14 = frames_to_atom14(aatype, torsion_angles_to_frames(aatype, FRAMES, sin_cos))
    atom37 = atom14_to_atom37(atom14, aatype)
    mask = torch.from_numpy(rc.restype_atom37_mask)[aatype].double()
    found = atom37_to_torsion_angles(aatype, atom37, mask, placeholder_for_undefined=False)
    defined = found["torsion_angles_mask"][:, 2:] > 0
    assert defined[:, 0].all()
    assert (defined[:, 1:] == (torch.from_numpy(rc.chi_angles_mask[:20]) > 0)).all()
    torch.testing.assert_close(
        found["torsion_angles_sin_cos"][:, 2:][defined], sin_cos[:, 2:][defined], atol=2e-3, rtol=0
    )
    chi, chi_mask = chi_angles(aatype, atom37, mask)
    there = chi_mask > 0
    torch.testing.assert_close(chi[there].sin(), angles[:, 3:][there].sin(), atol=2e-3, rtol=0)
    torch.testing.assert_close(chi[there].cos(), angles[:, 3:][there].cos(), atol=2e-3, rtol=0)


def test_alternative_angles_turn_symmetric_side_chains_by_180_degrees() -> None:
    aatype = torch.tensor([rc.restype_order["F"], rc.restype_order["L"]])
    found = atom37_to_torsion_angles(
        aatype, torch.randn(2, 37, 3).double(), torch.ones(2, 37).double(), placeholder_for_undefined=False
    )
    plain, other = found["torsion_angles_sin_cos"], found["alt_torsion_angles_sin_cos"]
    torch.testing.assert_close(other[0, 4], -plain[0, 4])  # chi2 of phenylalanine
    torch.testing.assert_close(other[1], plain[1])


def test_placeholder_for_undefined_angles() -> None:
    found = atom37_to_torsion_angles(
        torch.tensor([0]), torch.zeros(1, 37, 3), torch.zeros(1, 37), placeholder_for_undefined=True
    )
    assert found["torsion_angles_sin_cos"][0, :, 0].tolist() == [1.0] * 7
    assert found["torsion_angles_mask"].sum() == 0


@pytest.mark.parametrize("name", ["C_N", "CA_C"])
def test_ideal_backbone_has_ideal_bond_lengths(name: str) -> None:
    first, second = name.split("_")
    for residue in range(20):
        atoms = {
            a: rc.restype_atom14_rigid_group_positions[residue][i] for i, a in enumerate(("N", "CA", "C"))
        }
        if name == "CA_C":
            length = float(((atoms[first] - atoms[second]) ** 2).sum() ** 0.5)
            assert length == pytest.approx(1.525, abs=0.01)
        else:
            length = float(((atoms["N"] - atoms["CA"]) ** 2).sum() ** 0.5)
            assert length == pytest.approx(1.46, abs=0.01)


def test_tables_made_by_a_fold_serve_later_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigid, "_CONSTANTS", {})
    with torch.inference_mode():
        quaternion_to_rotation(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    quaternion = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(quaternion_to_rotation, quaternion)
