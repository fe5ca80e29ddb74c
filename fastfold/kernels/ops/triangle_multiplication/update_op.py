"""Update of the pair by contracted edges, for any rows and columns: what ends a triangle multiplication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_run_on_triton
from fastfold.kernels.common.gradients import unwritten_gradients, wanted_gradients
from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.scratch import Scratch, exact_dtype, refuse_gradients, without_autocast
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import eager


def triangle_update_definition(
    product: Tensor,
    z: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor,
) -> Tensor:
    """Specification of :func:`triangle_update`."""
    exact = torch.promote_types(z.dtype, torch.float32)
    x = layer_norm_definition(z.to(exact), norm_weight, norm_bias)
    out = layer_norm_definition(product.to(exact).movedim(-3, -1), norm_out_weight, norm_out_bias)
    out = linear(out, out_weight.to(exact), out_bias.to(exact))
    gate = linear(x, out_gate_weight.to(exact), out_gate_bias.to(exact))
    return (out * gate.sigmoid()).to(z.dtype)


@without_autocast
def _write_update(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    backend: str | None,
) -> Tensor:
    """Fill ``out``, which may be ``z`` or ``residual``."""
    dropout = None if dropout is None else dropout.expand_as(z)
    product = product.to(z.dtype).contiguous()
    if products_run_on_triton(z, max(parameters[4].shape), backend):
        from fastfold.kernels.ops.triangle_multiplication.triton_launch import write_updates

        write_updates(out, product, z, residual, dropout, parameters)
        return out
    weights, scratch = eager.arrange_update(parameters, z.dtype), Scratch().of(z)
    for i in batch_elements(z):
        b_residual, b_dropout = (None if x is None else x[i] for x in (residual, dropout))
        b_product = product[i].flatten(1)
        eager.write_update(out[i], b_product, z[i], b_residual, b_dropout, weights, scratch)
    return out


@torch.library.custom_op("fastfold::triangle_update", mutates_args=())
def _triangle_update(
    product: Tensor,
    z: Tensor,
    add_z: bool,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    backend: str | None,
) -> Tensor:
    residual = z if add_z else None
    return _write_update(torch.empty_like(z), product, z, residual, dropout, parameters, backend)


@_triangle_update.register_fake
def _(
    product: Tensor,
    z: Tensor,
    add_z: bool,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    backend: str | None,
) -> Tensor:
    return torch.empty_like(z)


@torch.library.custom_op("fastfold::triangle_update_backward", mutates_args=())
def _triangle_update_backward(
    grad: Tensor,
    product: Tensor,
    z: Tensor,
    add_grad: bool,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    """Gradients of ``product``, ``z`` and the parameters; those that nobody ``needs`` are empty."""
    grads = _update_gradients(grad, product, z, dropout, parameters, backend)
    if add_grad:
        grads[1] += grad
    return wanted_gradients(grads, (product, z, *parameters), needs)


@without_autocast
def _update_gradients(
    grad: Tensor,
    product: Tensor,
    z: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    backend: str | None,
) -> list[Tensor]:
    dropout = None if dropout is None else dropout.expand_as(z)
    if products_run_on_triton(z, max(parameters[4].shape), backend):
        from fastfold.kernels.ops.triangle_multiplication.triton_launch import update_backward

        return update_backward(grad, product, z, dropout, parameters)
    exact = exact_dtype(z)
    weights = eager.arrange_update(parameters, exact)
    zeros = [torch.zeros_like(p, dtype=exact) for p in parameters]
    totals = eager.arrange_update(zeros, exact)
    grad_product = product.to(exact, copy=True, memory_format=torch.contiguous_format)
    grad_z = torch.empty_like(z, dtype=exact)
    for i in batch_elements(z):
        scratch, b_dropout = Scratch().of(z, exact), None if dropout is None else dropout[i]
        eager.update_backward(
            grad_z[i], grad_product[i].flatten(1), grad[i], z[i], b_dropout, weights, totals, scratch
        )
        eager.norm_backward(grad_z[i], z[i], weights, totals)
    return [grad_product, grad_z, *eager.update_gradients(totals)]


@_triangle_update_backward.register_fake
def _(
    grad: Tensor,
    product: Tensor,
    z: Tensor,
    add_grad: bool,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    return unwritten_gradients((product, z, *parameters), needs)


def _setup_update(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    product, z, ctx.add_z, dropout, parameters, ctx.backend = inputs
    ctx.save_for_backward(product, z, dropout, *parameters)


def _differentiate_update(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    product, z, dropout, *parameters = ctx.saved_tensors
    needs = [x.requires_grad for x in (product, z, *parameters)]
    grads = _triangle_update_backward(grad, product, z, ctx.add_z, dropout, parameters, needs, ctx.backend)
    grad_product, grad_z, *rest = (g if need else None for g, need in zip(grads, needs, strict=True))
    return grad_product, grad_z, None, None, rest, None


_triangle_update.register_autograd(_differentiate_update, setup_context=_setup_update)


def triangle_update(
    product: Tensor,
    z: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor,
    add_z: bool = False,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Update of the pair by contracted edges: ``(LN(product) Oᵀ + o) · sigmoid(LN(z) Ogᵀ + og)``.

    The last lines of AlphaFold's supplement, algorithms 11 and 12, for any rows and columns of the pair.

    Args:
        product: Contracted edges ``[*, c, R, N]``.
        z: Part of the pair representation, ``[*, R, N, c_z]``.
        norm_weight: ``[c_z]``, scale of the normalisation of ``z``.
        norm_bias: ``[c_z]``, its shift.
        norm_out_weight: ``[c]``, scale of the normalisation of the product.
        norm_out_bias: ``[c]``, its shift.
        out_weight: O ``[c_z, c]``.
        out_bias: o ``[c_z]``.
        out_gate_weight: Og ``[c_z, c_z]``.
        out_gate_bias: og ``[c_z]``.
        add_z: Whether ``z`` is added to the update.
        dropout: Factors of the update that broadcast against ``z`` (zero or 1 / keep rate). A constant.
        out: Where the result goes, without recording gradients; may be ``z``.
        backend: ``auto``, ``triton`` (up to 256 channels, more take the PyTorch path) or ``torch``.

    Returns:
        The update ``[*, R, N, c_z]``, plus ``z`` if asked for, in the dtype of ``z``.

    Raises:
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    parameters = (
        norm_weight,
        norm_bias,
        norm_out_weight,
        norm_out_bias,
        out_weight,
        out_bias,
        out_gate_weight,
        out_gate_bias,
    )
    if out is None:
        return _triangle_update(product, z, add_z, dropout, parameters, backend)
    refuse_gradients(product, z, *parameters)
    return _write_update(out, product, z, z if add_z else None, dropout, parameters, backend)
