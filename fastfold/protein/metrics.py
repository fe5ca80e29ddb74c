"""Scores of a prediction against a reference structure."""

from __future__ import annotations

import torch
from torch import Tensor


def lddt(
    predicted: Tensor, reference: Tensor, mask: Tensor, *, cutoff: float = 15.0, per_residue: bool = True
) -> Tensor:
    """Local distance difference test on one point per residue, without the stereochemistry checks.

    Mariani et al. 2013 (doi:10.1093/bioinformatics/btt473), thresholds 0.5, 1, 2 and 4 Å.

    Args:
        predicted: ``[*, N, 3]`` in Å.
        reference: ``[*, N, 3]`` in Å.
        mask: ``[*, N]``, 1 where the reference has the point.
        cutoff: Reference distances under this count, in Å.
        per_residue: Return a score per residue; otherwise one per structure.

    Returns:
        ``[*, N]`` or ``[*]`` in [0, 1].
    """
    true = _distances(reference)
    counted = (true < cutoff) * mask[..., :, None] * mask[..., None, :]
    counted = counted * (1.0 - torch.eye(mask.shape[-1], dtype=mask.dtype, device=mask.device))
    error = (true - _distances(predicted)).abs()
    score = sum((error < limit).to(true.dtype) for limit in (0.5, 1.0, 2.0, 4.0)) * 0.25
    axes = (-1,) if per_residue else (-2, -1)
    return (1e-10 + (counted * score).sum(axes)) / (1e-10 + counted.sum(axes))


def _distances(points: Tensor) -> Tensor:
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + 1e-10).sqrt()
