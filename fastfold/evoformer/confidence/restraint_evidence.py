"""Probability of restraints by the distogram of a network, next to that of any pair at the same separation.

Restraints that agree with each other and with the sequence are more probable than the separation alone makes them;
wrong ones are less probable, or equally so where the network knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.evoformer.confidence.scores import row_blocks
from fastfold.evoformer.execution import LazyRows

_SEPARATIONS = 40  #: Separations in the chain from this one on, and pairs of different chains, are one class


class LimitedPairs(NamedTuple):
    """R pairs of residues and the limits of their CB distances."""

    first: Tensor  #: Numbers of residues ``[R]``, int64
    second: Tensor  #: ``[R]``, int64
    low: Tensor  #: ``[R]`` in Å
    high: Tensor  #: ``[R]`` in Å, infinite for none


def limit_probabilities(
    logits: Tensor | LazyRows,
    bin_edges: Tensor,
    pairs: LimitedPairs,
    *,
    residue_index: Tensor,
    present: Tensor,
    first_row: int = 0,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Return the probabilities that distances are within limits, ``[R, 2]``.

    The first is that of the pair, the second the mean over all pairs at the same separation in the chain.

    Args:
        logits: Of the distogram, rows ``[n, N, bins]`` from ``first_row`` on; all rows without ranks.
        bin_edges: ``[bins - 1]`` in Å, evenly spaced.
        pairs: The pairs.
        residue_index: ``[N]``; a gap parts chains.
        present: ``[N]``, False for padding.
        first_row: Number of the first row of ``logits``.
        sum_over_ranks: Sums a tensor over the processes that hold other rows.
    """
    width = bin_edges[1] - bin_edges[0]
    middles = bin_edges[0] - width / 2 + width * torch.arange(len(bin_edges) + 1, device=bin_edges.device)
    inside = (middles >= pairs.low[:, None]) & (middles <= pairs.high[:, None])
    # A range that is narrower than a bin, or beyond all bins, has the probability of the nearest one.
    center = (pairs.low + pairs.high.clamp(max=float(middles[-1]))) / 2
    nearest = torch.nn.functional.one_hot((middles - center[:, None]).abs().argmin(-1), len(middles))
    inside = torch.where(inside.any(-1, keepdim=True), inside, nearest > 0).to(middles)
    probability = middles.new_zeros(len(inside))
    totals = middles.new_zeros(_SEPARATIONS + 1, len(middles) + 1)
    for block, part in row_blocks(logits):
        row = first_row + block.start + torch.arange(part.shape[-3], device=middles.device)
        shares = torch.nn.functional.pad(part.float().softmax(-1), (0, 1), value=1.0)
        apart = (residue_index[row, None] - residue_index).abs().clamp(max=_SEPARATIONS).long()
        counted = (present[row, None] & present).to(shares)
        totals.index_add_(0, apart.flatten(), (shares * counted[..., None]).flatten(0, 1))
        place = pairs.first - (first_row + block.start)
        own = (place >= 0) & (place < len(row))
        of_pairs = shares[place[own], pairs.second[own], :-1]
        probability[own] = (of_pairs * inside[own]).sum(-1)
    both = sum_over_ranks(torch.cat([totals.flatten(), probability]))
    totals, probability = both[: totals.numel()].view_as(totals), both[totals.numel() :]
    apart = (residue_index[pairs.first] - residue_index[pairs.second]).abs().clamp(max=_SEPARATIONS).long()
    usual = (totals[apart, :-1] * inside).sum(-1) / totals[apart, -1].clamp(min=1)
    return torch.stack([probability, usual], -1)
