"""Points of rigid residues at their frames, in few operators: those of a descent take longer than their arithmetic."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastfold.protein.rigid import quaternion_to_rotation


def rotations(quaternion: Tensor) -> Tensor:
    """Return rotation matrices ``[N, 3, 3]`` of unit quaternions ``[N, 4]`` in (w, x, y, z) order."""
    products = (quaternion[:, :, None] * quaternion[:, None]).view(-1, 16)
    return (products @ _entries_by_products().to(quaternion)).view(-1, 3, 3)


def arms(rotation: Tensor, shape: Tensor) -> Tensor:
    """Return points ``[N, P, 3]`` from the origins of frames ``[N, 3, 3]``, by ``shape [N, P, 3]`` in them, in Å."""
    return shape @ rotation.mT


def placed(affines: Tensor, shape: Tensor) -> Tensor:
    """Return points ``[N, P, 3]`` of frames ``[N, 7]`` from ``shape [N, P, 3]`` in their frame, in Å."""
    return arms(rotations(affines[:, :4]), shape) + affines[:, None, 4:]


def torques(rotation: Tensor, arm: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradients ``[N, 3]`` by turns in the residues' frames, from those ``[N, P, 3]`` by points."""
    total = torch.linalg.cross(arm, gradient).sum(1, keepdim=True)
    return (total @ rotation).squeeze(1)


@functools.cache
def _entries_by_products() -> Tensor:
    """Return the share ``[16, 9]`` of each product of two parts of a quaternion in each entry of its rotation."""
    axes = torch.eye(4)
    single = quaternion_to_rotation(axes).flatten(1)
    both = quaternion_to_rotation(axes[:, None] + axes).flatten(2)
    return ((both - single[:, None] - single) / 2).flatten(0, 1)
