"""What all positions have in common, taken out of a product before its data are rounded.

Behind a normalisation much of what a position holds is what all of them hold: half to nine tenths of the squares in
networks of random parameters, two fifths to half in a trained one. Rounded with the rest it costs twice: it makes the
steps of 8 bits wide, and its rounding errors are the same everywhere and do not average out. So products in less than
float32 get what is left of the data, ``W x + b = W (x - m) + (b + W m)``, and the part in brackets is exact. The mean
``m`` is that of a sample: another gives the same result but for the rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastfold.kernels.common.scratch import normalise
from fastfold.kernels.cpu.linear import reduced

SAMPLE = 256
"""Positions of a sample at most, and an eighth of a small tensor."""

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fall evenly into the unit interval, in step with no axis

Norm = tuple[Tensor, Tensor]


def sample(x: Tensor) -> Tensor:
    """Copy ``[n, c]`` of at most 256 positions, spread over ``x [*, c]`` with any strides; the same in every run."""
    total = math.prod(x.shape[:-1])
    steps = torch.arange(min(SAMPLE, -(-total // 8)), dtype=torch.float64, device=x.device).mul_(_GOLDEN)
    positions = steps.frac_().mul_(total).long()
    return x[torch.unravel_index(positions, x.shape[:-1])]


def mean_of(positions: Tensor) -> Tensor:
    """Mean ``[c]`` of ``[n, c]``, to which what is not finite adds nothing; 0 where nothing is finite."""
    return positions.nanmean(0).nan_to_num_(0.0, 0.0, 0.0)


def centred(
    x: Tensor, norm: Norm, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Norm, Tensor | None]:
    """Move what the normalised positions have in common from a product's data into its bias.

    Args:
        x: ``[*, c]`` before the normalisation, in any dtype.
        norm: Scale and shift ``[c]``.
        eps: Of the normalisation.
        weight: ``[N, c]``, of what is multiplied with the normalised data.
        bias: ``[N]``, or None.

    Returns:
        Scale, shift and bias to use instead; the given ones where products with weights are in their own dtype.
    """
    if reduced(weight) is None:
        return norm, bias
    mean = mean_of(normalise(sample(x).to(weight.dtype), *norm, eps)[0])
    moved = torch.mv(weight, mean)
    return (norm[0], norm[1] - mean), moved if bias is None else bias + moved
