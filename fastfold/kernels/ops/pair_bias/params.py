"""Parameters of the bias of attention from the pair representation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PairBiasParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.pair_bias`, in the order of its arguments, or their gradients."""

    norm_weight: Tensor
    norm_bias: Tensor
    weight: Tensor
