"""Layer normalisation over the last axis, with statistics in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm


def layer_norm_definition(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Specification of :func:`layer_norm`, with every step spelled out."""
    exact = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(exact) - x.to(exact).mean(-1, keepdim=True)
    out = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        out = out * weight.to(exact)
    if bias is not None:
        out = out + bias.to(exact)
    return out.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    Args:
        x: ``[*, c]``, any floating dtype and any strides.
        weight: ``[c]`` scale, or None.
        bias: ``[c]`` shift, or None.
        eps: Added to the variance.

    Returns:
        ``[*, c]`` in the dtype of ``x``; mean and variance are accumulated in float32 (float64 for float64).
    """
    weight = weight if weight is None else weight.to(x.dtype)
    bias = bias if bias is None else bias.to(x.dtype)
    return torch_layer_norm(x, x.shape[-1:], weight, bias, eps)
