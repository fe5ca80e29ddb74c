"""Rigid transforms (rotation and translation) as plain tensors (supplement, section 1.8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.utils.device import has_float64

_CONSTANTS: dict[tuple[str, torch.device], Tensor] = {}


def constant(name: str, make: Callable[[], Any], device: torch.device) -> Tensor:
    """Return the tensor of an array ``[*]`` that ``make`` returns, made once for each device."""
    tensor = _CONSTANTS.get((name, device))
    if tensor is None:
        with torch.inference_mode(mode=False):  # gradients may be recorded later
            array = np.asarray(make())
            if array.dtype == np.float64 and not has_float64(device):
                array = array.astype(np.float32)
            tensor = torch.as_tensor(array, device=device)
        if type(tensor) is Tensor:  # fake tensors exist only during tracing
            _CONSTANTS[name, device] = tensor
    return tensor


@dataclass(frozen=True)
class Rigid:
    """Rigid transforms ``x -> R x + t``."""

    rotation: Tensor  #: ``[*, 3, 3]`` rotation matrices, columns are the axes of the local frame
    translation: Tensor  #: ``[*, 3]`` origins, in the unit of the points they act on

    def __getitem__(self, index: Any) -> Rigid:
        """Index the leading dimensions; ``index`` must not reach the last one or two axes."""
        index = index if isinstance(index, tuple) else (index,)
        vector = (*index, slice(None))
        matrix = (*vector, slice(None))
        return Rigid(self.rotation[matrix], self.translation[vector])

    def apply(self, points: Tensor) -> Tensor:
        """Map ``points [*, 3]`` from the local to the global frame."""
        return _rotate(self.rotation, points) + self.translation

    def invert_apply(self, points: Tensor) -> Tensor:
        """Map ``points [*, 3]`` from the global to the local frame."""
        return _rotate(self.rotation.transpose(-1, -2), points - self.translation)

    def compose(self, inner: Rigid) -> Rigid:
        """Return the transform that applies ``inner`` first, then this one."""
        return Rigid(
            self.rotation @ inner.rotation, _rotate(self.rotation, inner.translation) + self.translation
        )

    @staticmethod
    def from_three_points(
        point_on_neg_x_axis: Tensor, origin: Tensor, point_on_xy_plane: Tensor, *, eps: float = 1e-8
    ) -> Rigid:
        """Build frames from three points ``[*, 3]`` by Gram-Schmidt (supplement Algorithm 21).

        The x axis points from the first point to the origin; the third point is in the x-y plane. ``eps`` is added
        to squared lengths, so that coinciding points give finite numbers.
        """
        e0 = _normalize(origin - point_on_neg_x_axis, eps)
        e1 = point_on_xy_plane - origin
        e1 = _normalize(e1 - (e1 * e0).sum(-1, keepdim=True) * e0, eps)
        e2 = torch.linalg.cross(e0, e1)
        return Rigid(torch.stack([e0, e1, e2], dim=-1), origin)


def _rotate(rotation: Tensor, points: Tensor) -> Tensor:
    # A sum of products is computed in float32 on every device; a matmul may run in tf32.
    return (rotation * points.unsqueeze(-2)).sum(-1)


def _normalize(v: Tensor, eps: float) -> Tensor:
    return v / torch.sqrt(v.square().sum(-1, keepdim=True) + eps)


_SQUARES = ((0, 0), (1, 1), (2, 2), (3, 3))
_ROTATION_TERMS = (  # entry by entry of a rotation: pairs of parts of the quaternion, and their factors
    (_SQUARES, (1, 1, -1, -1)),
    (((1, 2), (0, 3)), (2, -2)),
    (((1, 3), (0, 2)), (2, 2)),
    (((1, 2), (0, 3)), (2, 2)),
    (_SQUARES, (1, -1, 1, -1)),
    (((2, 3), (0, 1)), (2, -2)),
    (((1, 3), (0, 2)), (2, -2)),
    (((2, 3), (0, 1)), (2, 2)),
    (_SQUARES, (1, -1, -1, 1)),
)


def _rotation_terms() -> np.ndarray:
    """Return the parts and the factor of each of four terms of each entry, ``[3, 4, 9]``; absent terms are 0."""
    terms = np.zeros((3, 4, 9), np.int64)
    for entry, (pairs, factors) in enumerate(_ROTATION_TERMS):
        for number, (pair, factor) in enumerate(zip(pairs, factors, strict=True)):
            terms[:, number, entry] = *pair, factor
    return terms


def quaternion_to_rotation(quaternion: Tensor) -> Tensor:
    """Return rotation matrices ``[*, 3, 3]`` of unit quaternions ``[*, 4]`` in (w, x, y, z) order."""
    # All products at once: the host takes longer to start an operator than a device to run it.
    first, second, factor = constant("rotation terms", _rotation_terms, quaternion.device).unbind()
    a, b, c, d = (quaternion[..., first] * factor * quaternion[..., second]).unbind(-2)
    return (a + b + c + d).unflatten(-1, (3, 3))


def rotation_to_quaternion(rotation: Tensor) -> Tensor:
    """Return unit quaternions ``[*, 4]`` (w, x, y, z), up to sign, of rotation matrices ``[*, 3, 3]``."""
    r = [[rotation[..., i, j] for j in range(3)] for i in range(3)]
    # The quaternion is the eigenvector of the largest eigenvalue of this symmetric matrix.
    k = [
        [r[0][0] + r[1][1] + r[2][2], r[2][1] - r[1][2], r[0][2] - r[2][0], r[1][0] - r[0][1]],
        [r[2][1] - r[1][2], r[0][0] - r[1][1] - r[2][2], r[0][1] + r[1][0], r[0][2] + r[2][0]],
        [r[0][2] - r[2][0], r[0][1] + r[1][0], r[1][1] - r[0][0] - r[2][2], r[1][2] + r[2][1]],
        [r[1][0] - r[0][1], r[0][2] + r[2][0], r[1][2] + r[2][1], r[2][2] - r[0][0] - r[1][1]],
    ]
    matrix = torch.stack([torch.stack(row, -1) for row in k], -2) / 3.0
    return torch.linalg.eigh(matrix).eigenvectors[..., -1]


def update_quaternion(quaternion: Tensor, vector: Tensor) -> Tensor:
    """Compose ``quaternion [*, 4]`` with the rotation ``(1, vector [*, 3])`` and normalise (Algorithm 23)."""
    w, xyz = quaternion.split((1, 3), -1)
    real = -(xyz * vector).sum(-1, keepdim=True)
    imaginary = w * vector + torch.linalg.cross(xyz, vector)
    updated = quaternion + torch.cat([real, imaginary], -1)
    return updated / torch.linalg.vector_norm(updated, dim=-1, keepdim=True)
