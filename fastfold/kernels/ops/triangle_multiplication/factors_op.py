"""Factors of a triangle multiplication, for any rows and columns of the pair.

Who cuts the pair over several devices contracts the factors in a way of his own. With ``triangle_update`` around that
it is the whole operator ``triangle_multiplication``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_run_on_triton
from fastfold.kernels.common.gradients import unwritten_gradients, wanted_gradients
from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.scratch import Scratch, exact_dtype, without_autocast
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import eager


def triangle_factors_definition(
    z: Tensor,
    mask: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
) -> Tensor:
    """Specification of :func:`triangle_factors`."""
    exact = torch.promote_types(z.dtype, torch.float32)
    x = layer_norm_definition(z.to(exact), norm_weight, norm_bias)
    p = mask.to(exact)[..., None] * linear(x, proj_weight.to(exact), proj_bias.to(exact))
    p = p * linear(x, gate_weight.to(exact), gate_bias.to(exact)).sigmoid()
    return p.movedim(-1, -3).to(z.dtype)


def _factors_shape(z: Tensor, parameters: Sequence[Tensor]) -> tuple[int, ...]:
    return (*z.shape[:-3], len(parameters[2]), *z.shape[-3:-1])


@torch.library.custom_op("fastfold::triangle_factors", mutates_args=())
@without_autocast
def _triangle_factors(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str | None) -> Tensor:
    sides = z.new_empty(_factors_shape(z, parameters))
    if products_run_on_triton(z, z.shape[-1], backend):
        from fastfold.kernels.ops.triangle_multiplication.triton_launch import write_factors

        write_factors(sides, z, mask, parameters)
        return sides
    weights, scratch = eager.arrange_factors(parameters, z.dtype), Scratch().of(z)
    for i in batch_elements(z):
        masks = eager.unless_ones(mask[i])
        eager.write_factors(sides[i].flatten(1), z[i], masks, weights, scratch)
    return sides


@_triangle_factors.register_fake
def _(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str | None) -> Tensor:
    return z.new_empty(_factors_shape(z, parameters))


@torch.library.custom_op("fastfold::triangle_factors_backward", mutates_args=())
def _triangle_factors_backward(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    parameters: Sequence[Tensor],
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    """Gradients of ``z`` and the parameters; those that nobody ``needs`` are empty."""
    grads = _factors_gradients(grad, z, mask, parameters, backend)
    return wanted_gradients(grads, (z, *parameters), needs)


@without_autocast
def _factors_gradients(
    grad: Tensor, z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str | None
) -> list[Tensor]:
    if products_run_on_triton(z, z.shape[-1], backend):
        from fastfold.kernels.ops.triangle_multiplication.triton_launch import factors_backward

        return factors_backward(grad.contiguous(), z, mask, parameters)
    exact = exact_dtype(z)
    weights = eager.arrange_factors(parameters, exact)
    zeros = [torch.zeros_like(p, dtype=exact) for p in parameters]
    totals = eager.arrange_factors(zeros, exact)
    grad_z = torch.zeros_like(z, dtype=exact)
    for i in batch_elements(z):
        masks, scratch = eager.unless_ones(mask[i]), Scratch().of(z, exact)
        b_grad = grad[i].to(exact, copy=True, memory_format=torch.contiguous_format).flatten(1)
        eager.factors_backward(grad_z[i], b_grad, z[i], masks, weights, totals, scratch, None)
    return [grad_z, *eager.factor_gradients(totals)]


@_triangle_factors_backward.register_fake
def _(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    parameters: Sequence[Tensor],
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    return unwritten_gradients((z, *parameters), needs)


def _setup_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, mask, parameters, ctx.backend = inputs
    ctx.save_for_backward(z, mask, *parameters)


def _differentiate_factors(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    z, mask, *parameters = ctx.saved_tensors
    needs = [x.requires_grad for x in (z, *parameters)]
    grads = _triangle_factors_backward(grad, z, mask, parameters, needs, ctx.backend)
    grad_z, *rest = (g if need else None for g, need in zip(grads, needs, strict=True))
    return grad_z, None, rest, None


_triangle_factors.register_autograd(_differentiate_factors, setup_context=_setup_factors)


def triangle_factors(
    z: Tensor,
    mask: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Factors of a triangle multiplication: ``mask · (LN(z) Pᵀ + b) · sigmoid(LN(z) Gᵀ + g)``, channels first.

    The first lines of AlphaFold's supplement, algorithms 11 and 12, for any rows and columns of the pair.

    Args:
        z: Part of the pair representation, ``[*, R, N, c_z]``.
        mask: ``[*, R, N]``, 1 for pairs to use and 0 otherwise. A constant: it receives no gradient.
        norm_weight: ``[c_z]``, scale of the normalisation.
        norm_bias: ``[c_z]``, its shift.
        proj_weight: P ``[2 c, c_z]``, the rows of the left factor before those of the right one.
        proj_bias: b ``[2 c]``.
        gate_weight: G ``[2 c, c_z]``, in the same order.
        gate_bias: g ``[2 c]``.
        backend: ``auto``, ``triton`` (up to 256 channels, more take the PyTorch path) or ``torch``.

    Returns:
        ``[*, 2 c, R, N]`` in the dtype of ``z``: the channels of the left factor before those of the right one.

    Raises:
        ConfigError: The backend does not exist or cannot run here.
    """
    parameters = (norm_weight, norm_bias, proj_weight, proj_bias, gate_weight, gate_bias)
    return _triangle_factors(z, mask, parameters, backend)
