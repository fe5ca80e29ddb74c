"""Transition: the two-layer perceptron that acts on every element of a representation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from fastfold.kernels.layer_norm import layer_norm_definition


def transition_definition(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """Specification of :func:`transition`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    hidden = layer_norm_definition(x.to(exact), norm_weight, norm_bias)
    hidden = relu(linear(hidden, w1.to(exact), b1.to(exact)))
    return linear(hidden, w2.to(exact), b2.to(exact)).to(x.dtype)


def transition(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """``relu(LN(x) w1ᵀ + b1) w2ᵀ + b2`` (AlphaFold supplement, algorithms 9 and 15).

    Args:
        x: ``[*, c]``, any strides.
        norm_weight: ``[c]``, scale of the normalisation.
        norm_bias: ``[c]``, its shift.
        w1: ``[n c, c]``; the intermediate has n·c channels (4·c in AlphaFold).
        b1: ``[n c]``.
        w2: ``[c, n c]``.
        b2: ``[c]``.

    Returns:
        The update ``[*, c]``, in the dtype of ``x``.
    """
    return transition_definition(x, norm_weight, norm_bias, w1, b1, w2, b2)
