"""Operators in eager PyTorch, in the dtype of their inputs, as in a network without custom kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastfold import kernels


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Compute :func:`fastfold.kernels.layer_norm`."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def softmax(scores: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Compute the weights ``[*, R, H, Nq, Nk]`` of attention."""
    if bias is not None:
        scores = scores + bias.unsqueeze(-4)
    if mask is not None:
        scores = scores.masked_fill(
            mask[..., None, None, :] == 0, -1e9 if scores.dtype != torch.half else -6e4
        )
    return scores.softmax(-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Compute :func:`fastfold.kernels.attention`, with all scores in memory."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    out = (softmax(scores, bias, mask) @ v).transpose(-3, -2)
    return out if gate is None else out * gate.sigmoid()


def gated_attention(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    parameters: kernels.GatedAttentionParams,
    *,
    heads: int,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute :func:`fastfold.kernels.gated_attention`."""
    p = parameters
    assert p.gate_weight is not None
    normed = layer_norm(x, p.norm_weight, p.norm_bias)
    q, k, v = (
        functional.linear(normed, w).unflatten(-1, (heads, -1))
        for w in (p.query_weight, p.key_weight, p.value_weight)
    )
    gate = functional.linear(normed, p.gate_weight, p.gate_bias).unflatten(-1, (heads, -1))
    out = attention(q, k, v, bias, mask, gate).flatten(-2)
    return _finished(functional.linear(out, p.output_weight, p.output_bias), residual, dropout)


def pair_bias(z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    """Compute :func:`fastfold.kernels.pair_bias`."""
    return functional.linear(layer_norm(z, norm_weight, norm_bias), weight).movedim(-1, -3)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor,
    parameters: kernels.TriangleParams,
    *,
    outgoing: bool = True,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute :func:`fastfold.kernels.triangle_multiplication`."""
    w = parameters
    x = layer_norm(z, w.norm_in_weight, w.norm_in_bias)
    p = functional.linear(x, w.proj_weight, w.proj_bias)
    p = p * functional.linear(x, w.gate_weight, w.gate_bias).sigmoid()
    left, right = (mask[..., None] * p).chunk(2, dim=-1)
    equation = "...ikc,...jkc->...ijc" if outgoing else "...kjc,...kic->...ijc"
    product = layer_norm(torch.einsum(equation, left, right), w.norm_out_weight, w.norm_out_bias)
    update = functional.linear(product, w.out_weight, w.out_bias)
    update = update * functional.linear(x, w.out_gate_weight, w.out_gate_bias).sigmoid()
    return _finished(update, residual, dropout)


def outer_product_mean(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-3,
    *,
    residual: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute :func:`fastfold.kernels.outer_product_mean`, with all outer products in memory."""
    left, right = left * left_mask[..., None], right * right_mask[..., None]
    products = torch.einsum("...sic,...sje->...ijce", left, right).flatten(-2)
    counts = torch.einsum("...si,...sj->...ij", left_mask, right_mask)[..., None]
    return _finished(functional.linear(products, weight, bias) / (eps + counts), residual, None)


def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    residual: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute :func:`fastfold.kernels.transition`."""
    hidden = functional.linear(layer_norm(x, norm_weight, norm_bias), w1, b1).relu()
    return _finished(functional.linear(hidden, w2, b2), residual, None)


def residual_update(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Tensor:
    """Compute :func:`fastfold.kernels.residual_update`."""
    x = x if bias is None else x + bias
    return _finished(x if gate is None else x * gate.sigmoid(), residual, dropout)


def _finished(update: Tensor, residual: Tensor | None, dropout: Tensor | None) -> Tensor:
    update = update if dropout is None else update * dropout
    return update if residual is None else residual + update


PLAIN = {
    "layer_norm": layer_norm,
    "attention": attention,
    "gated_attention": gated_attention,
    "pair_bias": pair_bias,
    "triangle_multiplication": triangle_multiplication,
    "outer_product_mean": outer_product_mean,
    "transition": transition,
}
"""Functions that the network calls, by their names in :mod:`fastfold.kernels`."""


@contextmanager
def plain_network() -> Iterator[None]:
    """Let networks run the functions of this file in place of the kernels."""
    originals = {name: getattr(kernels, name) for name in PLAIN}
    try:
        for name, function in PLAIN.items():
            setattr(kernels, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(kernels, name, function)


def additive_mask(bias: Tensor, mask: Tensor) -> Tensor:
    """Return ``[R, H, Nq, Nk]``: the bias, minus infinity at masked keys."""
    return bias.masked_fill(mask[..., None, None, :] == 0, -math.inf)
