"""Scores of a prediction against a reference structure that need no superposition: lDDT and dRMSD."""

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
    """Local distance difference test on one point per residue, without the stereochemistry checks.

    Mariani et al. 2013 (doi:10.1093/bioinformatics/btt473), thresholds 0.5, 1, 2 and 4 Å.

    Args:
        predicted: ``[*, N, 3]`` in Å.
        reference: ``[*, N, 3]`` in Å.
        mask: ``[*, N]``, 1 where the reference has the point.
        predicted_mask: ``[*, N]``, 1 where the prediction has it: distances to points that are missing there count
            as wrong. By default the prediction is complete.
        cutoff: Reference distances under this count, in Å.
        per_residue: Return a score per residue; otherwise one per structure.

    Returns:
        ``[*, N]`` or ``[*]`` in [0, 1]; 1 where no distance counts.
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
    """Root mean square deviation ``[*]`` in Å of all distances between two points.

    A mirror image has the same distances: dRMSD does not see handedness.

    Args:
        predicted: ``[*, N, 3]`` in Å, for dRMSD-CA the alpha carbons.
        reference: ``[*, N, 3]`` in Å.
        mask: ``[*, N]``, 1 for the points that count. With fewer than two the result is 0.
    """
    pairs = (mask[..., :, None] * mask[..., None, :]).triu(1)
    squared = (_distances(predicted) - _distances(reference)).square()
    return ((squared * pairs).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1.0)).sqrt()


def _distances(points: Tensor) -> Tensor:
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + 1e-10).sqrt()
