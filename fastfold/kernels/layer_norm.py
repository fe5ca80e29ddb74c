"""Layer normalisation over the last axis, with statistics in float32 or better."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastfold.kernels.blocks import (
    block_positions,
    exact_dtype,
    normalise,
    normalise_backward,
    position_blocks,
    without_autocast,
)


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


class _LayerNorm(torch.autograd.Function):
    """Keeps only its input: the statistics are recomputed block by block."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        exact = exact_dtype(x)
        weight = None if weight is None else weight.to(exact)
        bias = None if bias is None else bias.to(exact)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for b_x, b_out in position_blocks(block_positions(x.shape[-1]), x, out):
            b_out.copy_(normalise(b_x.to(exact), weight, bias, eps)[0])
        return out

    @staticmethod
    @without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        exact = exact_dtype(x)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        weight = None if weight is None else weight.to(exact)
        bias = None if bias is None else bias.to(exact)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
        grad_weight = x.new_zeros(x.shape[-1], dtype=exact) if need_weight else None
        grad_bias = x.new_zeros(x.shape[-1], dtype=exact) if need_bias else None
        wanted = [x, grad] if grad_x is None else [x, grad, grad_x]
        for b_x, b_grad, *b_grad_x in position_blocks(block_positions(x.shape[-1]), *wanted):
            b_x = b_x.to(exact)
            _, *statistics = normalise(b_x, None, None, ctx.eps)
            b_result = normalise_backward(
                b_grad.to(exact), b_x, statistics, weight, bias, grad_weight, grad_bias
            )
            for b_out in b_grad_x:
                b_out.copy_(b_result)
        return grad_x, grad_weight, grad_bias, None


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
    return _LayerNorm.apply(x, weight, bias, eps)
