"""Least-squares superposition of corresponding points."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.protein.rigid import Rigid


def superpose(moving: Tensor, fixed: Tensor, weights: Tensor) -> Rigid:
    """Compute the rigid motion of points ``[*, N, 3]`` onto their partners with the least weighted squared error.

    Kabsch 1976 (doi:10.1107/S0567739476001873), without reflections. If the best motion is not unique (fewer than three
    points, or all on a line) one of the best is returned; without any weight the identity. Lengths are in Å, ``weights
    [*, N]`` not negative; points of weight 0 may have any finite value.

    Returns:
        Motions ``[*]``: ``motion[..., None].apply(moving)`` is superposed on ``fixed``. Float64 inputs give float64,
        all others float32.
    """
    dtype = torch.float64 if torch.float64 in (moving.dtype, fixed.dtype) else torch.float32
    moving, fixed = moving.to(dtype), fixed.to(dtype)
    share = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)).to(dtype)[..., None]
    center, target = (share * moving).sum(-2), (share * fixed).sum(-2)
    covariance = (share * (fixed - target[..., None, :])).mT @ (moving - center[..., None, :])
    rotation = best_rotation(covariance)
    return Rigid(rotation, target - (rotation @ center[..., None]).squeeze(-1))


def best_rotation(covariance: Tensor) -> Tensor:
    """Return rotations ``[*, 3, 3]`` that maximise ``trace(R^T C)`` for covariances ``C [*, 3, 3]`` (fixed, moving)."""
    u, _, v = torch.linalg.svd(covariance)
    # Where the best orthogonal matrix is a reflection, flip the direction of least extent.
    last = torch.linalg.det(u) * torch.linalg.det(v)
    u = torch.cat([u[..., :2], u[..., 2:] * last.sign()[..., None, None]], -1)
    return u @ v


def rmsd(predicted: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Compute the root mean square deviation ``[*]`` in Å after the best superposition, in float64.

    Both are ``[*, N, 3]`` in Å, and ``mask [*, N]`` is 1 for the points that count. Without any the result is 0.
    """
    predicted, reference = predicted.double(), reference.double()
    moved = superpose(predicted, reference, mask)[..., None].apply(predicted)
    squared = (moved - reference).square().sum(-1)
    return ((squared * mask).sum(-1) / mask.sum(-1).clamp(min=1e-12)).sqrt()
