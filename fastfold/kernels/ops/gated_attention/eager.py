"""Blocks of rows of gated self-attention in PyTorch, and how its parameters are arranged for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastfold.kernels.common.scratch import Scratch, exact_dtype, finish, normalise, normalise_backward
from fastfold.kernels.ops.attention.eager import Operands, attend, attend_backward
from fastfold.kernels.ops.attention.eager import prepare as prepare  # of the interface of this module

EPS = 1e-5

# Positions whose projections are made at once: enough for the full rate of the matrix product.
_POSITIONS = 1024

backward_dtype = exact_dtype
"""Dtype that the backward pass makes products in."""


class Weights(NamedTuple):
    """Parameters as the passes use them, or their gradients.

    The rows of ``merged [3 or 4, H D, c]`` are queries, keys, values and gates.
    """

    norm: tuple[Tensor, Tensor]
    merged: Tensor
    gate_bias: Tensor | None
    output: Tensor
    output_bias: Tensor

    @property
    def flat(self) -> Tensor:
        """``merged`` as a matrix."""
        return self.merged.flatten(0, 1)


def arrange(parameters: Sequence[Any], dtype: torch.dtype) -> Weights:
    """Parameters in the order of the public function; those of the norm in an exact dtype."""
    norm_weight, norm_bias, query, key, value, gate, gate_bias, output, output_bias = parameters
    exact = torch.promote_types(dtype, torch.float32)
    return Weights(
        (norm_weight.to(exact), norm_bias.to(exact)),
        torch.stack([x.to(dtype) for x in (query, key, value, gate) if x is not None]),
        None if gate_bias is None else gate_bias.to(dtype),
        output.to(dtype),
        output_bias.to(dtype),
    )


def row_step(x: Tensor) -> int:
    """Rows of a block of ``x [R, N, c]``, for the projections."""
    return max(1, _POSITIONS // max(1, x.shape[1]))


def project(normed: Tensor, weights: Weights, heads: int, scratch: Scratch) -> tuple[Tensor, ...]:
    """Queries, keys, values and gate logits of a block: ``normed [r, N, c]`` to ``[r, N, H, D]`` each."""
    width = weights.merged.shape[1]
    out = scratch("projected", *normed.shape[:2], len(weights.flat))
    if weights.gate_bias is None:
        torch.mm(normed.flatten(0, 1), weights.flat.t(), out=out.flatten(0, 1))
    else:
        # Within the product, so that gate logits are rounded once.
        shift = pad(weights.gate_bias, (3 * width, 0))
        torch.addmm(shift, normed.flatten(0, 1), weights.flat.t(), out=out.flatten(0, 1))
    return out.unflatten(-1, (-1, heads, width // heads)).unbind(2)


def forward_block(
    out: Tensor,
    operands: tuple[Tensor, Tensor | None, Tensor | None],
    weights: Weights,
    heads: int,
    residual: Tensor | None,
    dropout: Tensor | None,
    scratch: Scratch,
) -> None:
    """Fill a block of rows ``out [r, N, c]``, which may be that of ``x`` or of the residual."""
    x, bias, masked = operands
    normed = normalise(x.to(weights.norm[0].dtype), *weights.norm, EPS)[0].to(scratch.dtype)
    q, k, v, *gate = project(normed, weights, heads, scratch)
    attended = scratch("attended", *q.shape)
    attend(
        attended,
        Operands(q, k, v, bias, masked, gate[0] if gate else None),
        q.shape[-1] ** -0.5,
        scratch,
    )
    update = scratch("update", *x.shape[:2], len(weights.output))
    flat = attended.view(-1, weights.output.shape[1])
    torch.addmm(weights.output_bias, flat, weights.output.t(), out=update.flatten(0, 1))
    finish(out, update, residual, dropout)


def backward_block(
    grad: Tensor,
    operands: tuple[Tensor, Tensor | None, Tensor | None],
    grad_bias: Tensor | None,
    weights: Weights,
    totals: Weights,
    heads: int,
    scratch: Scratch,
) -> Tensor:
    """Gradient of a block of rows, ``[r, N, c]``; adds those of bias and parameters to their totals."""
    x, bias, masked = operands
    x = scratch.copy("x", x)
    normed, *statistics = normalise(x, *weights.norm, EPS)
    q, k, v, *gate = project(normed, weights, heads, scratch)
    grad = grad.flatten(0, 1)
    grad_attended = torch.mm(
        grad, weights.output, out=scratch("grad_attended", len(grad), weights.output.shape[1])
    )
    grad_projected = scratch("grad_projected", *x.shape[:2], len(weights.flat))
    grads = grad_projected.unflatten(-1, (-1, *q.shape[2:])).unbind(2)
    attended = scratch("attended", *q.shape)
    attend_backward(
        grad_attended.view(q.shape),
        Operands(q, k, v, bias, masked, gate[0] if gate else None),
        Operands(grads[0], grads[1], grads[2], grad_bias, None, grads[3] if gate else None),
        q.shape[-1] ** -0.5,
        scratch,
        attended,
    )
    totals.output.addmm_(grad.t(), attended.view(len(grad), -1))
    totals.output_bias.add_(grad.sum(0))
    grad_projected = grad_projected.flatten(0, 1)
    totals.flat.addmm_(grad_projected.t(), normed.flatten(0, 1))
    if totals.gate_bias is not None:
        totals.gate_bias.add_(grad_projected[:, -len(totals.gate_bias) :].sum(0))
    grad_normed = torch.mm(
        grad_projected, weights.flat, out=scratch("grad_normed", *normed.flatten(0, 1).shape)
    )
    return normalise_backward(grad_normed.view(x.shape), x, statistics, *weights.norm, *totals.norm)
