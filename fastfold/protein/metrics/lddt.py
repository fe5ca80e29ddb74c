"""Scores against a reference structure without superposition: lDDT and dRMSD."""

from __future__ import annotations

import torch
from torch import Tensor


def lddt(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    *,
    predicted_mask: Tensor | None = None,
    cutoff: float = 15.0,
    per_residue: bool = True,
) -> Tensor:
    """Compute the local distance difference test (lDDT) on one point per residue, without stereochemistry checks.

    Mariani et al. 2013 (doi:10.1093/bioinformatics/btt473), thresholds 0.5, 1, 2 and 4 Å.

    Args:
        predicted: ``[*, N, 3]`` in Å.
        reference: ``[*, N, 3]`` in Å.
        mask: ``[*, N]``, 1 for points of the reference.
        predicted_mask: ``[*, N]``, 1 for points of the prediction; distances to missing ones count as wrong. None for
            a complete prediction.
        cutoff: Reference distances under this count, in Å.
        per_residue: Return a score per residue; otherwise one per structure.

    Returns:
        ``[*, N]`` or ``[*]`` in [0, 1]; 1 if no distance counts.
    """
    true = _distances(reference)
    counted = (true < cutoff) * mask[..., :, None] * mask[..., None, :]
    counted = counted * (1.0 - torch.eye(mask.shape[-1], dtype=mask.dtype, device=mask.device))
    error = (true - _distances(predicted)).abs()
    score = sum((error < limit).to(true.dtype) for limit in (0.5, 1.0, 2.0, 4.0)) * 0.25
    if predicted_mask is not None:
        score = score * predicted_mask[..., :, None] * predicted_mask[..., None, :]
    axes = (-1,) if per_residue else (-2, -1)
    return (1e-10 + (counted * score).sum(axes)) / (1e-10 + counted.sum(axes))


def drmsd(predicted: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Compute the root mean square deviation ``[*]`` in Å of all distances between two points.

    dRMSD ignores handedness, because a mirror image has the same distances.

    Both are ``[*, N, 3]`` in Å, for dRMSD-CA the alpha carbons, and ``mask [*, N]`` is 1 for the points that count.
    With fewer than two the result is 0.
    """
    pairs = (mask[..., :, None] * mask[..., None, :]).triu(1)
    squared = (_distances(predicted) - _distances(reference)).square()
    return ((squared * pairs).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1.0)).sqrt()


def _distances(points: Tensor) -> Tensor:
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + 1e-10).sqrt()
