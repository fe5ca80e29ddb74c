"""Bias of attention heads from a pair tensor: layer normalisation and projection in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_run_on_triton
from fastfold.kernels.common.constants import MOST_HEADS
from fastfold.kernels.common.scratch import (
    Scratch,
    block_positions,
    exact_dtype,
    normalise,
    normalise_backward,
    position_blocks,
    without_autocast,
)
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition

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


@torch.library.custom_op("fastfold::pair_bias", mutates_args=())
@without_autocast
def _pair_bias(
    z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, backend: str | None
) -> Tensor:
    if _runs_on_triton(z, weight, backend):
        from fastfold.kernels.ops.pair_bias.triton_fwd import pair_bias_forward

        with torch.cuda.device_of(z):
            return pair_bias_forward(z, norm_weight, norm_bias, weight.to(z.dtype), _EPS)
    exact = exact_dtype(z)
    norm, weight = (norm_weight.to(exact), norm_bias.to(exact)), weight.to(z.dtype)
    out = z.new_empty(*z.shape[:-3], len(weight), *z.shape[-3:-1])
    for i in itertools.product(*map(range, z.shape[:-3])):
        for b_out, b_z in _blocks(out[i], z[i]):
            b_normed = normalise(b_z.to(exact), *norm, _EPS)[0].to(z.dtype)
            b_out.copy_(weight @ b_normed.t())
    return out


@_pair_bias.register_fake
def _pair_bias_fake(
    z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, backend: str | None
) -> Tensor:
    return z.new_empty(*z.shape[:-3], weight.shape[0], *z.shape[-3:-1])


@torch.library.custom_op("fastfold::pair_bias_backward", mutates_args=())
@without_autocast
def _pair_bias_backward(
    grad: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    need_z: bool,
    need_parameters: bool,
    backend: str | None,
) -> list[Tensor]:
    """Gradients for z and, together, the three parameters, where they are needed."""
    exact = exact_dtype(z)
    if _runs_on_triton(z, weight, backend):
        from fastfold.kernels.ops.pair_bias.triton_bwd import pair_bias_backward

        parameters = norm_weight, norm_bias, weight.to(z.dtype)
        with torch.cuda.device_of(z):
            first, others = pair_bias_backward(grad, z, *parameters, _EPS, need_z, need_parameters)
        return others if first is None else [first, *others]
    norm_weight, norm_bias, weight = (p.to(exact) for p in (norm_weight, norm_bias, weight))
    totals = [torch.zeros_like(p) for p in (norm_weight, norm_bias, weight)]
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
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
    return [grad_z] * need_z + totals * need_parameters


@_pair_bias_backward.register_fake
def _pair_bias_backward_fake(
    grad: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    need_z: bool,
    need_parameters: bool,
    backend: str | None,
) -> list[Tensor]:
    grads = [torch.empty_like(z, memory_format=torch.contiguous_format)] if need_z else []
    if need_parameters:
        grads += [z.new_empty(p.shape, dtype=exact_dtype(z)) for p in (norm_weight, norm_bias, weight)]
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the inputs alone: what is normalised exists for one block at a time, in both directions."""
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    need = ctx.needs_input_grad[:4]
    grads = _pair_bias_backward(grad, *tensors, need[0], any(need[1:]), ctx.backend)
    if not need[0]:
        grads = [None, *grads]
    if not any(need[1:]):
        grads = [*grads, None, None, None]
    found = zip(grads, tensors, need, strict=True)
    return (*(g.to(t.dtype) if n else None for g, t, n in found), None)


_pair_bias.register_autograd(_backward, setup_context=_setup_context)


def _runs_on_triton(z: Tensor, weight: Tensor, backend: str | None) -> bool:
    """Whether Triton runs the operator; what a program cannot hold is left to PyTorch."""
    return products_run_on_triton(z, weight.shape[1], backend) and weight.shape[0] <= MOST_HEADS


def pair_bias(
    z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, *, backend: str | None = None
) -> Tensor:
    """``LN(z) Wᵀ`` with the heads in front, as attention reads it (supplement algorithms 7, 13 and 14).

    Args:
        z: ``[*, A, B, c]``, any strides.
        norm_weight: ``[c]``, scale of the normalisation.
        norm_bias: ``[c]``, its shift.
        weight: W ``[H, c]``.
        backend: As in :func:`fastfold.kernels.common.backend.choose_backend`; more than 256 channels or 16 heads are
            PyTorch's in any case.

    Returns:
        ``[*, H, A, B]`` in the dtype of ``z``.

    Raises:
        ConfigError: The backend cannot run here.
    """
    return _pair_bias(z, norm_weight, norm_bias, weight, backend)
