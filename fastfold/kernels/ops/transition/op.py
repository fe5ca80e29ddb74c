"""Transition: the two-layer perceptron that acts on every element of a representation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from fastfold.kernels.common.backend import products_run_on_triton
from fastfold.kernels.common.gradients import unwritten_gradients, wanted_gradients
from fastfold.kernels.common.scratch import (
    Scratch,
    block_positions,
    exact_dtype,
    finish,
    normalise,
    normalise_backward,
    position_blocks,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition

_EPS = 1e-5


def transition_definition(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """Specification of :func:`transition`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    hidden = layer_norm_definition(x.to(exact), norm_weight, norm_bias)
    hidden = relu(linear(hidden, w1.to(exact), b1.to(exact)))
    return linear(hidden, w2.to(exact), b2.to(exact)).to(x.dtype)


@without_autocast
def _forward(
    out: Tensor,
    x: Tensor,
    parameters: Sequence[Tensor],
    residual: Tensor | None,
    scratch: Scratch,
    backend: str | None,
) -> None:
    """Fill ``out``, which may be ``x`` or ``residual``."""
    if products_run_on_triton(x, x.shape[-1], backend):
        from fastfold.kernels.ops.transition import triton_fwd

        triton_fwd.forward(out, x, parameters, residual)
        return
    exact = exact_dtype(x)
    norm_weight, norm_bias = (p.to(exact) for p in parameters[:2])
    w1, b1, w2, b2 = (p.to(x.dtype) for p in parameters[2:])
    scratch = scratch.of(x)
    residuals = () if residual is None else (residual,)
    for b_x, b_out, *b_residual in position_blocks(block_positions(len(w1)), x, out, *residuals):
        b_norm = normalise(b_x.to(exact), norm_weight, norm_bias, _EPS)[0].to(x.dtype)
        b_hidden = torch.addmm(b1, b_norm, w1.t(), out=scratch("hidden", len(b_x), len(w1))).relu_()
        b_update = torch.addmm(b2, b_hidden, w2.t(), out=scratch("update", *b_out.shape))
        finish(b_out, b_update, b_residual[0] if b_residual else None, None)


@torch.library.custom_op("fastfold::transition", mutates_args=())
def _transition(
    x: Tensor, residual: Tensor | None, add_x: bool, parameters: Sequence[Tensor], backend: str | None
) -> Tensor:
    out = torch.empty_like(x)
    _forward(out, x, parameters, x if add_x else residual, Scratch(), backend)
    return out


@_transition.register_fake
def _(
    x: Tensor, residual: Tensor | None, add_x: bool, parameters: Sequence[Tensor], backend: str | None
) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fastfold::transition_backward", mutates_args=())
def _transition_backward(
    grad: Tensor,
    x: Tensor,
    parameters: Sequence[Tensor],
    add_grad: bool,
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    """Gradients of ``x`` and the parameters; those that nobody ``needs`` are empty."""
    if products_run_on_triton(x, x.shape[-1], backend):
        from fastfold.kernels.ops.transition import triton_bwd

        grads = without_autocast(triton_bwd.backward)(grad, x, parameters, add_grad, needs)
    else:
        grads = _backward(grad, x, parameters, add_grad, needs)
    return wanted_gradients(grads, (x, *parameters), needs)


@_transition_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    parameters: Sequence[Tensor],
    add_grad: bool,
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    return unwritten_gradients((x, *parameters), needs)


@without_autocast
def _backward(
    grad: Tensor, x: Tensor, parameters: Sequence[Tensor], add_grad: bool, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients by blocks of rows; the intermediate exists for one block at a time.

    Computed in an exact dtype whatever that of the data: a bfloat16 product would decide for some of the hidden
    units on the wrong side of the ReLU.
    """
    exact = exact_dtype(x)
    totals = [
        torch.zeros_like(p, dtype=exact) if n else None for p, n in zip(parameters, needs[1:], strict=True)
    ]
    grad_norm_weight, grad_norm_bias, grad_w1, grad_b1, grad_w2, grad_b2 = totals
    norm_weight, norm_bias, w1, b1, w2, _ = (p.to(exact) for p in parameters)
    scratch = Scratch().of(x, exact)
    grad_x = torch.empty_like(x)
    for b_x, b_grad, b_grad_x in position_blocks(block_positions(len(w1)), x, grad, grad_x):
        b_x, b_grad = b_x.to(exact), b_grad.to(exact)
        b_norm, *statistics = normalise(b_x, norm_weight, norm_bias, _EPS)
        b_hidden = torch.addmm(b1, b_norm, w1.t(), out=scratch("hidden", len(b_x), len(w1))).relu_()
        if grad_w2 is not None:
            grad_w2.addmm_(b_grad.t(), b_hidden)
        if grad_b2 is not None:
            grad_b2 += b_grad.sum(0)
        b_grad_hidden = torch.mm(b_grad, w2, out=scratch("grad_hidden", len(b_x), len(w1)))
        torch.ops.aten.threshold_backward(b_grad_hidden, b_hidden, 0, grad_input=b_grad_hidden)
        if grad_w1 is not None:
            grad_w1.addmm_(b_grad_hidden.t(), b_norm)
        if grad_b1 is not None:
            grad_b1 += b_grad_hidden.sum(0)
        b_grad_norm = torch.mm(b_grad_hidden, w1, out=scratch("grad_norm", *b_x.shape))
        b_result = normalise_backward(
            b_grad_norm, b_x, statistics, norm_weight, norm_bias, grad_norm_weight, grad_norm_bias
        )
        finish(b_grad_x, b_result, b_grad if add_grad else None, None)
    return [grad_x, *totals]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.add_x, parameters, ctx.backend = inputs
    ctx.save_for_backward(x, *parameters)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Keeps only the input of the operator, and recomputes the rest."""
    x, *parameters = ctx.saved_tensors
    needs = [x.requires_grad, *(p.requires_grad for p in parameters)]
    grads = _transition_backward(grad, x, parameters, ctx.add_x, needs, ctx.backend)
    grad_x, *rest = (g if need else None for g, need in zip(grads, needs, strict=True))
    return grad_x, grad if ctx.needs_input_grad[1] else None, None, rest, None


_transition.register_autograd(_differentiate, setup_context=_setup_context)


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
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    backend: str | None = None,
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
        residual: ``[*, c]`` to add to the update, most often ``x`` itself.
        out: Where the result goes, without recording gradients; may be ``x`` or ``residual``.
        scratch: With ``out``: buffers to use, and to leave behind for the next operator.
        backend: ``auto``, ``triton`` (up to 256 channels, more take the PyTorch path) or ``torch``.

    Returns:
        The update ``[*, c]``, plus the residual, in the dtype of ``x``.

    Raises:
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    parameters = (norm_weight, norm_bias, w1, b1, w2, b2)
    if out is None:
        return _transition(x, None if residual is x else residual, residual is x, parameters, backend)
    refuse_gradients(x, residual, *parameters)
    _forward(out, x, parameters, residual, scratch or Scratch(), backend)
    return out
