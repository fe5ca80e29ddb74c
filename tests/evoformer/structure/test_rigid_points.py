"""Points and torques of rigid residues are those of their rotations, and of a numerical derivative."""

from __future__ import annotations

import torch

from fastfold.evoformer.structure.rigid_points import arms, placed, rotations, torques
from fastfold.protein.rigid import quaternion_to_rotation, update_quaternion


def frames(count: int = 5) -> torch.Tensor:
    torch.manual_seed(0)
    quaternion = torch.nn.functional.normalize(torch.randn(count, 4).double(), dim=-1)
    return torch.cat([quaternion, torch.randn(count, 3).double()], -1)


def test_rotations_are_those_of_quaternions() -> None:
    quaternion = frames()[:, :4]
    torch.testing.assert_close(rotations(quaternion), quaternion_to_rotation(quaternion))


def test_points_are_turned_and_moved() -> None:
    affines, shape = frames(), torch.randn(5, 4, 3).double()
    rotation = quaternion_to_rotation(affines[:, :4])
    expected = torch.einsum("nij,npj->npi", rotation, shape) + affines[:, None, 4:]
    torch.testing.assert_close(placed(affines, shape), expected)


def test_torques_are_the_derivatives_by_turns_in_the_residue_s_frame() -> None:
    quaternion, shape, pull = frames()[:, :4], torch.randn(5, 4, 3).double(), torch.randn(5, 4, 3).double()
    rotation = rotations(quaternion)
    found = torques(rotation, arms(rotation, shape), pull)
    turn = torch.zeros(5, 3).double().requires_grad_()
    turned = quaternion_to_rotation(update_quaternion(quaternion, turn))
    energy = (pull * torch.einsum("nij,npj->npi", turned, shape)).sum()
    # A quaternion (1, v) is a turn by 2 |v|.
    torch.testing.assert_close(found, torch.autograd.grad(energy, turn)[0] / 2)
