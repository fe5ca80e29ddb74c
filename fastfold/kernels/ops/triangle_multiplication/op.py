"""Triangle multiplication: every edge is updated from the other two edges of all triangles it is part of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_run_on_triton
from fastfold.kernels.common.gradients import unwritten_gradients, wanted_gradients
from fastfold.kernels.common.scratch import Scratch, refuse_gradients, without_autocast
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import eager
from fastfold.kernels.ops.triangle_multiplication.contraction import ContractionPlan


def triangle_multiplication_definition(
    z: Tensor,
    mask: Tensor,
    *,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor,
    outgoing: bool,
) -> Tensor:
    """Specification of :func:`triangle_multiplication`."""
    exact = torch.promote_types(z.dtype, torch.float32)

    def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight.to(exact), bias.to(exact))

    x = layer_norm_definition(z.to(exact), norm_in_weight, norm_in_bias)
    p = mask.to(exact)[..., None] * affine(x, proj_weight, proj_bias)
    p = p * affine(x, gate_weight, gate_bias).sigmoid()
    left, right = p.chunk(2, dim=-1)
    if outgoing:
        out = torch.einsum("...ikc,...jkc->...ijc", left, right)
    else:
        out = torch.einsum("...kjc,...kic->...ijc", left, right)
    out = affine(layer_norm_definition(out, norm_out_weight, norm_out_bias), out_weight, out_bias)
    return (out * affine(x, out_gate_weight, out_gate_bias).sigmoid()).to(z.dtype)


@without_autocast
def _forward(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    outgoing: bool,
    parameters: Sequence[Tensor],
    residual: Tensor | None,
    dropout: Tensor | None,
    scratch: Scratch,
    plan: ContractionPlan,
    backend: str | None,
) -> None:
    """Fill ``out``; ``dropout`` has the shape of ``z``."""
    rest = (parameters, residual, dropout, scratch, plan)
    if products_run_on_triton(z, max(parameters[8].shape), backend):
        from fastfold.kernels.ops.triangle_multiplication import triton_launch

        triton_launch.forward(out, z, mask, outgoing, *rest)
    else:
        eager.forward(out, z, mask, outgoing, *rest)


@torch.library.custom_op("fastfold::triangle_multiplication", mutates_args=())
def _triangle_multiplication(
    z: Tensor,
    mask: Tensor,
    outgoing: bool,
    residual: Tensor | None,
    add_z: bool,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    backend: str | None,
) -> Tensor:
    """Between the two halves the channels come first, ``[c, N, N]``.

    So the contraction is a batch of plain matrix products; the projections write this layout and read it.
    """
    dropout = None if dropout is None else dropout.expand_as(z)
    out = torch.empty_like(z)
    rest = (z if add_z else residual, dropout, Scratch(), ContractionPlan(), backend)
    _forward(out, z, mask, outgoing, parameters, *rest)
    return out


@_triangle_multiplication.register_fake
def _(
    z: Tensor,
    mask: Tensor,
    outgoing: bool,
    residual: Tensor | None,
    add_z: bool,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    backend: str | None,
) -> Tensor:
    return torch.empty_like(z)


@torch.library.custom_op("fastfold::triangle_multiplication_backward", mutates_args=())
def _triangle_multiplication_backward(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    outgoing: bool,
    add_grad: bool,
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    """Gradients of ``z`` and the parameters; those that nobody ``needs`` are empty."""
    dropout = None if dropout is None else dropout.expand_as(z)
    arguments = (grad, z, mask, dropout, parameters, outgoing, add_grad)
    if products_run_on_triton(z, max(parameters[8].shape), backend):
        from fastfold.kernels.ops.triangle_multiplication import triton_launch

        grads = without_autocast(triton_launch.backward)(*arguments, needs)
    else:
        grads = eager.backward(*arguments)
    return wanted_gradients(grads, (z, *parameters), needs)


@_triangle_multiplication_backward.register_fake
def _(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    outgoing: bool,
    add_grad: bool,
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    return unwritten_gradients((z, *parameters), needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, mask, ctx.outgoing, _, ctx.add_z, dropout, parameters, ctx.backend = inputs
    ctx.save_for_backward(z, mask, dropout, *parameters)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Keeps only the inputs of the operator, and recomputes the rest."""
    z, mask, dropout, *parameters = ctx.saved_tensors
    needs = [x.requires_grad for x in (z, *parameters)]
    grads = _triangle_multiplication_backward(
        grad, z, mask, dropout, parameters, ctx.outgoing, ctx.add_z, needs, ctx.backend
    )
    grad_z, *rest = (g if need else None for g, need in zip(grads, needs, strict=True))
    grad_residual = grad if ctx.needs_input_grad[3] else None
    return grad_z, None, None, grad_residual, None, None, rest, None


_triangle_multiplication.register_autograd(_differentiate, setup_context=_setup_context)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor,
    *,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor,
    outgoing: bool,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    plan: ContractionPlan | None = None,
    backend: str | None = None,
) -> Tensor:
    """Update of the pair representation by triangle multiplication (AlphaFold supplement, algorithms 11, 12).

    With ``x = LN(z)`` and ``left, right = chunk(mask · (x Pᵀ + b) · sigmoid(x Gᵀ + g))``, the contraction is
    ``out[i, j] = Σ_k left[i, k] · right[j, k]`` (outgoing) or ``Σ_k left[k, j] · right[k, i]`` (incoming, in
    the order of AlphaFold's own program), and the update ``(LN(out) Oᵀ + o) · sigmoid(x Ogᵀ + og)``.

    Memory beside inputs and result, in pair tensors ``[N, N, c]`` of one batch element: forward 2 on the Triton backend
    (the product, and the factors of half its channels), and 1.5 from N² c = 2²⁷ on (of a quarter) and on the PyTorch
    path, or what a plan says
    (:func:`~fastfold.kernels.ops.triangle_multiplication.contraction.contraction_bytes`); backward 3 and an eighth on
    the Triton backend, in the dtype of ``z``, and 3 on the PyTorch path, which like the gradient of ``z`` are float32
    there.

    Args:
        z: Pair representation ``[*, N, N, c_z]``.
        mask: ``[*, N, N]``, 1 for pairs to use and 0 otherwise. A constant: it receives no gradient.
        norm_in_weight: ``[c_z]``, scale of the first normalisation.
        norm_in_bias: ``[c_z]``, its shift.
        proj_weight: P ``[2 c, c_z]``, the rows of ``left`` before those of ``right``.
        proj_bias: b ``[2 c]``.
        gate_weight: G ``[2 c, c_z]``, in the same order.
        gate_bias: g ``[2 c]``.
        norm_out_weight: ``[c]``, scale of the second normalisation.
        norm_out_bias: ``[c]``, its shift.
        out_weight: O ``[c_z, c]``.
        out_bias: o ``[c_z]``.
        out_gate_weight: Og ``[c_z, c_z]``.
        out_gate_bias: og ``[c_z]``.
        outgoing: Which of the two contractions.
        residual: ``[*, N, N, c_z]`` to add to the update, most often ``z`` itself.
        dropout: Factors of the update that broadcast against ``z`` (zero or 1 / keep rate). A constant.
        out: Where the result goes, without recording gradients; may be ``z`` or ``residual``.
        scratch: With ``out``: buffers to use, and to leave behind for the next operator.
        plan: With ``out``: how many factors exist at a time, and whether the product waits on the host.
        backend: ``auto``, ``triton`` (up to 256 channels, more take the PyTorch path) or ``torch``.

    Returns:
        The update ``[*, N, N, c_z]``, plus the residual, in the dtype of ``z``.

    Raises:
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    parameters = (
        norm_in_weight,
        norm_in_bias,
        proj_weight,
        proj_bias,
        gate_weight,
        gate_bias,
        norm_out_weight,
        norm_out_bias,
        out_weight,
        out_bias,
        out_gate_weight,
        out_gate_bias,
    )
    if out is None:
        rest = (None if residual is z else residual, residual is z, dropout)
        return _triangle_multiplication(z, mask, outgoing, *rest, parameters, backend)
    refuse_gradients(z, residual, *parameters)
    dropout = None if dropout is None else dropout.expand_as(z)
    scratch, plan = scratch or Scratch(), plan or ContractionPlan()
    _forward(out, z, mask, outgoing, parameters, residual, dropout, scratch, plan, backend)
    return out
