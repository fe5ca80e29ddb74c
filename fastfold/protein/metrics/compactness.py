"""Size and density of a CA trace, which reveal collapsed structures.

lDDT counts only pairs that are near in the experiment, so it rewards a ball of overlapping residues. The radius of
gyration and the number of impossibly near neighbours reveal such a structure.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOO_NEAR = 3.8
"""CA atoms of residues that are not neighbours are farther apart than this in nearly all experiments, in Å."""

_BONDED = 2


def radius_of_gyration(points: Tensor, mask: Tensor) -> Tensor:
    """Return the root mean squared distance ``[*]`` of points ``[*, N, 3]`` from their centre, in Å.

    The ``mask [*, N]`` is 1 for points that count; without any the result is 0. Other points may have any value.

    Example:
        >>> radius_of_gyration(torch.tensor([[0.0, 0, 0], [2.0, 0, 0]]), torch.ones(2)).item()
        1.0
    """
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    points = points.masked_fill((mask == 0)[..., None], 0.0)
    mask = mask.to(points.dtype)
    count = mask.sum(-1).clamp(min=1)
    center = (points * mask[..., None]).sum(-2, keepdim=True) / count[..., None, None]
    return (((points - center).square().sum(-1) * mask).sum(-1) / count).sqrt()


def near_neighbors(points: Tensor, mask: Tensor, *, distance: float = TOO_NEAR) -> float:
    """Return the mean number of impossibly near CA atoms of a residue, about 0.002 in experiments.

    Pairs of ``points [N, 3]`` below ``distance`` in Å count, if they are more than two residues apart in the chain and
    their ``mask [N]`` is 1.
    """
    at = torch.arange(len(points), device=points.device)
    apart = (at[:, None] - at).abs() > _BONDED
    counted = (mask > 0)[:, None] & (mask > 0)
    near = (torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") < distance) & apart
    return float((near & counted).sum() / (mask > 0).sum().clamp(min=1))
