"""pLDDT, aligned error and pTM from the logits of the heads (supplement, sections 1.9.6 and 1.9.7)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastfold.evoformer.execution import LazyRows


def plddt(logits: Tensor) -> Tensor:
    """Return the expected lDDT-CA per residue ``[*, N]``, 0 to 100, from logits ``[*, N, bins]``."""
    bins = logits.shape[-1]
    centres = (torch.arange(bins, device=logits.device, dtype=torch.float32) + 0.5) / bins
    return 100.0 * (torch.softmax(logits.float(), -1) * centres).sum(-1)


def bin_centres(breaks: Tensor) -> Tensor:
    """Return the centres ``[bins]`` of error bins with edges ``breaks [bins - 1]``, both in Å.

    The last bin is as wide as the others.
    """
    step = breaks[1] - breaks[0]
    centres = breaks + step / 2
    return torch.cat([centres, centres[-1:] + step])


def predicted_aligned_error(logits: Tensor | LazyRows, breaks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expected aligned error ``[*, N, N]`` and its largest possible value, in Å.

    The bins of ``logits [*, N, N, bins]`` have the edges ``breaks [bins - 1]`` in Å.
    """
    centres = bin_centres(breaks.float())
    error = torch.empty(logits.shape[:-1], dtype=centres.dtype, device=centres.device)
    for rows, part in row_blocks(logits):
        error[..., rows, :] = torch.softmax(part.float(), -1) @ centres
    return error, centres[-1]


def predicted_tm_score(
    logits: Tensor | LazyRows,
    breaks: Tensor,
    *,
    residue_weights: Tensor | None = None,
    asym_id: Tensor | None = None,
) -> Tensor:
    """Return the predicted TM-score (pTM), or the interface pTM (ipTM) if ``asym_id`` is given.

    Args:
        logits: Aligned error logits ``[N, N, bins]``.
        breaks: ``[bins - 1]`` bin edges in Å.
        residue_weights: ``[N]`` weight of each residue; ones by default.
        asym_id: ``[N]`` chain of each residue; only pairs in different chains count (ipTM). None for pTM.

    Returns:
        Scalar in [0, 1]: the best score over all residues that the others are aligned on.
    """
    if residue_weights is None:
        residue_weights = torch.ones(logits.shape[-2], device=breaks.device)
    centres = bin_centres(breaks.float())
    tm_of_bin = tm_score_of_bins(centres, float(residue_weights.sum()))
    per_alignment = torch.empty_like(residue_weights, dtype=tm_of_bin.dtype)
    for rows, part in row_blocks(logits):
        expected = torch.softmax(part.float(), -1) @ tm_of_bin
        weights = residue_weights[None, :] * residue_weights[rows, None]
        if asym_id is not None:
            weights = weights * (asym_id[rows, None] != asym_id[None, :])
        normed = weights / (1e-8 + weights.sum(-1, keepdim=True))
        per_alignment[rows] = (expected * normed).sum(-1)
    best = int((per_alignment * residue_weights).argmax())
    return per_alignment[best]


def tm_score_of_bins(centres: Tensor, residues: float) -> Tensor:
    """Return the TM-score term ``[bins]`` of an aligned error in each bin with ``centres [bins]`` in Å.

    ``residues`` is the length from which d0 of the TM-score is computed; lengths below 19 count as 19.
    """
    d0 = 1.24 * (max(residues, 19.0) - 15.0) ** (1.0 / 3.0) - 1.8
    return 1.0 / (1.0 + (centres / d0).square())


def row_blocks(logits: Tensor | LazyRows) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows ``[*, rows, N, bins]`` with their indices."""
    if isinstance(logits, LazyRows):
        yield from logits.blocks()
    else:
        for start in range(0, logits.shape[-3], 256):
            rows = slice(start, min(logits.shape[-3], start + 256))
            yield rows, logits[..., rows, :, :]
