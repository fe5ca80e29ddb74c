"""Bias of attention heads from a pair tensor: layer normalisation and projection in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from fastfold.kernels.blocks import (
    Scratch,
    block_positions,
    exact_dtype,
    normalise,
    normalise_backward,
    position_blocks,
    without_autocast,
)
from fastfold.kernels.layer_norm import layer_norm_definition

_EPS = 1e-5


def pair_bias_definition(z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    """Specification of :func:`pair_bias`."""
    exact = exact_dtype(z)
    normed = layer_norm_definition(z.to(exact), norm_weight, norm_bias)
    return linear(normed, weight.to(exact)).movedim(-1, -3).to(z.dtype)


def _blocks(bias: Tensor, *pairs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of positions of ``[A, B, c]`` tensors, after their columns ``[H, n]`` of ``bias [H, A, B]``."""
    columns, start = bias.flatten(1), 0
    for parts in position_blocks(block_positions(pairs[0].shape[-1]), *pairs):
        yield columns[:, start : start + len(parts[0])], *parts
        start += len(parts[0])


class _PairBias(torch.autograd.Function):
    """Keeps only its input; what is normalised exists for one block at a time, in both directions."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(z, norm_weight, norm_bias, weight)
        exact = exact_dtype(z)
        norm, weight = (norm_weight.to(exact), norm_bias.to(exact)), weight.to(z.dtype)
        out = z.new_empty(*z.shape[:-3], len(weight), *z.shape[-3:-1])
        for i in itertools.product(*map(range, z.shape[:-3])):
            for b_out, b_z in _blocks(out[i], z[i]):
                b_normed = normalise(b_z.to(exact), *norm, _EPS)[0].to(z.dtype)
                b_out.copy_(weight @ b_normed.t())
        return out

    @staticmethod
    @without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, *parameters = ctx.saved_tensors
        exact = exact_dtype(z)
        norm_weight, norm_bias, weight = (p.to(exact) for p in parameters)
        totals = [torch.zeros_like(p) for p in (norm_weight, norm_bias, weight)]
        grad_z = torch.empty_like(z)
        scratch = Scratch().of(z, exact)
        for i in itertools.product(*map(range, z.shape[:-3])):
            for b_grad, b_z, b_grad_z in _blocks(grad[i], z[i], grad_z[i]):
                b_grad, b_z = b_grad.to(exact), b_z.to(exact)
                b_normed, *statistics = normalise(b_z, norm_weight, norm_bias, _EPS)
                totals[2].addmm_(b_grad, b_normed)
                b_grad_normed = torch.mm(b_grad.t(), weight, out=scratch("grad_normed", *b_z.shape))
                b_grad_z.copy_(
                    normalise_backward(b_grad_normed, b_z, statistics, norm_weight, norm_bias, *totals[:2])
                )
        grads = (grad_z, *totals)
        return tuple(x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=True))


def pair_bias(z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    """``LN(z) Wᵀ`` with the heads in front, as attention reads it (supplement algorithms 7, 13 and 14).

    Args:
        z: ``[*, A, B, c]``, any strides.
        norm_weight: ``[c]``, scale of the normalisation.
        norm_bias: ``[c]``, its shift.
        weight: W ``[H, c]``.

    Returns:
        ``[*, H, A, B]`` in the dtype of ``z``.
    """
    return _PairBias.apply(z, norm_weight, norm_bias, weight)
