"""Removal of the mean over positions from a product's data, before they are rounded.

After a normalisation, positions have much in common (``benchmarks/results/choices.md`` has shares). Rounding the common
part costs twice: it widens the steps of 8 bits, and its rounding errors are equal everywhere, so they do not average
out. So reduced-precision products get the rest of the data: ``W x + b = W (x - m) + (b + W m)``, with the part in
brackets exact. The mean ``m`` is that of a sample: another sample gives the same result except for rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastfold.kernels.common.scratch import normalise
from fastfold.kernels.cpu.linear import reduced

SAMPLE = 256
"""Maximum number of positions of a sample; a small tensor gives an eighth of its positions."""

# Multiples of the golden ratio fill the unit interval evenly, without the period of any axis.
_GOLDEN = (math.sqrt(5) - 1) / 2

Norm = tuple[Tensor, Tensor]


def sample(x: Tensor) -> Tensor:
    """Copy at most 256 positions ``[n, c]``, spread over ``x [*, c]`` with any strides; equal in every run."""
    total = math.prod(x.shape[:-1])
    steps = torch.arange(min(SAMPLE, -(-total // 8)), dtype=torch.float64, device=x.device).mul_(_GOLDEN)
    positions = steps.frac_().mul_(total).long()
    return x[torch.unravel_index(positions, x.shape[:-1])]


def mean_of(positions: Tensor) -> Tensor:
    """Return the mean ``[c]`` of the finite values of ``[n, c]``; 0 for channels without any."""
    return positions.nanmean(0).nan_to_num_(0.0, 0.0, 0.0)


def centred(
    x: Tensor, norm: Norm, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Norm, Tensor | None]:
    """Move the mean of the positions ``x [*, c]``, normalised by ``norm``, from the data of a product into its bias.

    The product's weight is ``[N, c]``, and its bias ``[N]`` or None.

    Returns:
        Scale, shift and bias to use instead; unchanged if products with weights are in their own dtype.
    """
    if reduced(weight) is None:
        return norm, bias
    mean = mean_of(normalise(sample(x).to(weight.dtype), *norm, eps)[0])
    moved = torch.mv(weight, mean)
    return (norm[0], norm[1] - mean), moved if bias is None else bias + moved
