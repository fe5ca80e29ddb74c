"""Gated self-attention with everything around it: norm, merged projections, attention, gate, output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from fastfold.kernels.attention import (
    Operands,
    attend,
    attend_backward,
    attention_definition,
    prepare,
)
from fastfold.kernels.blocks import (
    Scratch,
    exact_dtype,
    finish,
    normalise,
    normalise_backward,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.layer_norm import layer_norm_definition

_EPS = 1e-5

# Positions whose projections are made at once: enough for the full rate of the matrix product.
_POSITIONS = 1024


def gated_attention_definition(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    output_weight: Tensor,
    output_bias: Tensor,
    heads: int,
) -> Tensor:
    """Specification of :func:`gated_attention`."""
    exact = exact_dtype(x)
    normed = layer_norm_definition(x.to(exact), norm_weight, norm_bias)

    def project(weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(normed, weight.to(exact), None if bias is None else bias.to(exact)).unflatten(
            -1, (heads, -1)
        )

    q, k, v = project(query_weight), project(key_weight), project(value_weight)
    gate = None if gate_weight is None else project(gate_weight, gate_bias)
    out = attention_definition(q, k, v, bias, mask, gate).flatten(-2)
    return linear(out, output_weight.to(exact), output_bias.to(exact)).to(x.dtype)


class _Weights(NamedTuple):
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


def _arrange(parameters: Sequence[Any], dtype: torch.dtype) -> _Weights:
    """Parameters in the order of the public function; those of the norm in an exact dtype."""
    norm_weight, norm_bias, query, key, value, gate, gate_bias, output, output_bias = parameters
    exact = torch.promote_types(dtype, torch.float32)
    return _Weights(
        (norm_weight.to(exact), norm_bias.to(exact)),
        torch.stack([x.to(dtype) for x in (query, key, value, gate) if x is not None]),
        None if gate_bias is None else gate_bias.to(dtype),
        output.to(dtype),
        output_bias.to(dtype),
    )


@without_autocast
def _forward(
    out: Tensor,
    x: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    heads: int,
    parameters: Sequence[Tensor | None],
    residual: Tensor | None,
    dropout: Tensor | None,
    scratch: Scratch,
) -> None:
    """Fill ``out``; ``bias`` and ``masked`` are those of :func:`prepare`, ``dropout`` has the shape of ``x``."""
    weights = _arrange(parameters, x.dtype)
    scratch = scratch.of(x)
    for i in itertools.product(*map(range, x.shape[:-3])):
        for row in _rows(x[i]):
            b_update = _forward_block(
                x[i][row], _at(bias, i), _at(masked, (*i, row)), weights, heads, scratch
            )
            finish(out[i][row], b_update, _at(residual, (*i, row)), _at(dropout, (*i, row)))


class _GatedAttention(torch.autograd.Function):
    """Keeps its input; projections, scores and output exist for one block of rows at a time, in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        heads: int,
        residual: Tensor | None,
        add_x: bool,
        dropout: Tensor | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        bias, masked = prepare(bias, mask, x.dtype)
        dropout = None if dropout is None else dropout.expand_as(x)
        ctx.save_for_backward(x, bias, masked, dropout, *parameters)
        ctx.heads, ctx.add_x = heads, add_x
        out = torch.empty_like(x)
        _forward(out, x, bias, masked, heads, parameters, x if add_x else residual, dropout, Scratch())
        return out

    @staticmethod
    @without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, masked, dropout, *parameters = ctx.saved_tensors
        exact = exact_dtype(x)
        weights = _arrange(parameters, exact)
        totals = _arrange([p if p is None else torch.zeros_like(p, dtype=exact) for p in parameters], exact)
        scratch = Scratch().of(x, exact)
        grad_x = torch.empty_like(x)
        grad_bias = torch.zeros_like(bias, dtype=exact) if ctx.needs_input_grad[1] else None
        for i in itertools.product(*map(range, x.shape[:-3])):
            for row in _rows(x[i]):
                b_grad = scratch.copy("grad_update", grad[i][row])
                if dropout is not None:
                    b_grad.mul_(dropout[i][row])
                operands = (x[i][row], _at(bias, i), _at(masked, (*i, row)))
                b_grad_x = _backward_block(
                    b_grad, operands, _at(grad_bias, i), weights, totals, ctx.heads, scratch
                )
                finish(grad_x[i][row], b_grad_x, grad[i][row] if ctx.add_x else None, None)
        query, key, value, *gate = totals.merged.unbind(0)
        gates = (gate[0] if gate else None, totals.gate_bias)
        before = (grad_x, grad_bias, None, None, grad, None, None)
        grads = (*before, *totals.norm, query, key, value, *gates, *totals[3:])
        return tuple(x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=True))


def _at(x: Tensor | None, index: tuple[int | slice, ...]) -> Tensor | None:
    return None if x is None else x[index]


def _rows(x: Tensor) -> list[slice]:
    """Blocks of rows of ``x [R, N, c]``, for the projections."""
    step = max(1, _POSITIONS // x.shape[1])
    return [slice(r, r + step) for r in range(0, len(x), step)]


def _project(normed: Tensor, weights: _Weights, heads: int, scratch: Scratch) -> tuple[Tensor, ...]:
    """Queries, keys, values and gate logits of a block: ``normed [r, N, c]`` to ``[r, N, H, D]`` each."""
    width = weights.merged.shape[1]
    out = scratch("projected", *normed.shape[:2], len(weights.flat))
    torch.mm(normed.flatten(0, 1), weights.flat.t(), out=out.flatten(0, 1))
    if weights.gate_bias is not None:
        out[..., 3 * width :].add_(weights.gate_bias)
    return out.unflatten(-1, (-1, heads, width // heads)).unbind(2)


def _forward_block(
    x: Tensor, bias: Tensor | None, masked: Tensor | None, weights: _Weights, heads: int, scratch: Scratch
) -> Tensor:
    """Update of a block of rows ``x [r, N, c]``, in scratch memory."""
    normed = normalise(x.to(weights.norm[0].dtype), *weights.norm, _EPS)[0].to(scratch.dtype)
    q, k, v, *gate = _project(normed, weights, heads, scratch)
    attended = scratch("attended", *q.shape)
    operands = Operands(q, k, v, bias, masked, gate[0] if gate else None)
    attend(attended, operands, q.shape[-1] ** -0.5, scratch)
    out = scratch("update", *x.shape[:2], len(weights.output))
    torch.addmm(
        weights.output_bias,
        attended.view(-1, weights.output.shape[1]),
        weights.output.t(),
        out=out.flatten(0, 1),
    )
    return out


def _backward_block(
    grad: Tensor,
    operands: tuple[Tensor, Tensor | None, Tensor | None],
    grad_bias: Tensor | None,
    weights: _Weights,
    totals: _Weights,
    heads: int,
    scratch: Scratch,
) -> Tensor:
    """Gradient of a block of rows, ``[r, N, c]``; adds those of bias and parameters to their totals."""
    x, bias, masked = operands
    x = scratch.copy("x", x)
    normed, *statistics = normalise(x, *weights.norm, _EPS)
    q, k, v, *gate = _project(normed, weights, heads, scratch)
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


def gated_attention(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    output_weight: Tensor,
    output_bias: Tensor,
    heads: int,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Self-attention within every row, as a residual branch: ``(attention(LN(x)) · sigmoid(gate)) Oᵀ + o``.

    The whole of AlphaFold's MSA row and column attention (supplementary algorithms 7 and 8) and triangle attention
    (13 and 14) but for the projection of the pair bias. For columns give transposed views: no copy is made.

    Args:
        x: ``[*, R, N, c]``; attention is along N.
        bias: Added to the scaled scores of every row, ``[*, H, N, N]``, or None.
        mask: Keys to use (not 0) and to leave out (0), ``[*, R, N]``, or None; see :func:`attention`.
        norm_weight: ``[c]``, scale of the normalisation.
        norm_bias: ``[c]``, its shift.
        query_weight: ``[H D, c]``.
        key_weight: ``[H D, c]``.
        value_weight: ``[H D, c]``.
        gate_weight: ``[H D, c]``, or None for no gate.
        gate_bias: ``[H D]``, or None for no gate.
        output_weight: O ``[c, H D]``.
        output_bias: o ``[c]``.
        heads: H.
        residual: ``[*, R, N, c]`` to add to the update, most often ``x`` itself.
        dropout: Factors of the update that broadcast against ``x`` (zero or 1 / keep rate). A constant.
        out: Where the result goes, without recording gradients; may be ``x`` or ``residual``.
        scratch: With ``out``: buffers to use, and to leave behind for the next operator.

    Returns:
        The update ``[*, R, N, c]``, plus the residual, in the dtype and memory layout of ``x``.

    Raises:
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    projections = (query_weight, key_weight, value_weight, gate_weight, gate_bias)
    parameters = (norm_weight, norm_bias, *projections, output_weight, output_bias)
    if out is None:
        rest = (None if residual is x else residual, residual is x, dropout)
        return _GatedAttention.apply(x, bias, mask, heads, *rest, *parameters)
    refuse_gradients(x, bias, residual, *parameters)
    dropout = None if dropout is None else dropout.expand_as(x)
    operands = (x, *prepare(bias, mask, x.dtype), heads, parameters, residual, dropout)
    _forward(out, *operands, scratch or Scratch())
    return out
