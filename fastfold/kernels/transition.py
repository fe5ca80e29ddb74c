"""Transition: the two-layer perceptron that acts on every element of a representation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, relu

from fastfold.kernels.blocks import (
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
from fastfold.kernels.layer_norm import layer_norm_definition

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
    out: Tensor, x: Tensor, parameters: Sequence[Tensor], residual: Tensor | None, scratch: Scratch
) -> None:
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


class _Transition(torch.autograd.Function):
    """Keeps only its input; the intermediate exists for one block at a time, in both directions.

    Gradients are computed in an exact dtype whatever that of the data: a bfloat16 product would decide for
    some of the hidden units on the wrong side of the ReLU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, add_x: bool, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.add_x = add_x
        out = torch.empty_like(x)
        _forward(out, x, parameters, x if add_x else residual, Scratch())
        return out

    @staticmethod
    @without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        exact = exact_dtype(x)
        need_x, need_residual, _, *need = ctx.needs_input_grad
        totals = [
            torch.zeros_like(p, dtype=exact) if n else None for p, n in zip(parameters, need, strict=True)
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
            finish(b_grad_x, b_result, b_grad if ctx.add_x else None, None)
        return grad_x if need_x else None, grad if need_residual else None, None, *totals


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

    Returns:
        The update ``[*, c]``, plus the residual, in the dtype of ``x``.

    Raises:
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    parameters = (norm_weight, norm_bias, w1, b1, w2, b2)
    if out is None:
        return _Transition.apply(x, None if residual is x else residual, residual is x, *parameters)
    refuse_gradients(x, residual, *parameters)
    _forward(out, x, parameters, residual, scratch or Scratch())
    return out
