"""Gated self-attention with everything around it: norm, merged projections, attention, gate, output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.errors import InputError
from fastfold.kernels.common.scratch import Scratch, exact_dtype, finish, refuse_gradients, without_autocast
from fastfold.kernels.ops.attention.op import attention_backend, attention_definition
from fastfold.kernels.ops.gated_attention.eager import arrange
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition


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


def _blocks(backend: str) -> Any:
    """The module with the blocks of a backend."""
    if backend == "triton":
        from fastfold.kernels.ops.gated_attention import triton_launch

        return triton_launch
    from fastfold.kernels.ops.gated_attention import eager

    return eager


def _rows(x: Tensor, step: int) -> list[slice]:
    return [slice(r, r + step) for r in range(0, len(x) if x.numel() else 0, step)]


def _at(x: Tensor | None, index: tuple[int | slice, ...]) -> Tensor | None:
    return None if x is None else x[index]


@without_autocast
def _fill(
    out: Tensor,
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    heads: int,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor | None],
    backend: str,
    scratch: Scratch,
) -> None:
    """Fill ``out``; projections, scores and output exist for one block of rows at a time."""
    blocks = _blocks(backend)
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(parameters, x.dtype)
    scratch = scratch.of(x)
    for i in itertools.product(*map(range, x.shape[:-3])):
        for row in _rows(x[i], blocks.row_step(x[i])):
            blocks.forward_block(
                out[i][row],
                (x[i][row], _at(bias, i), _at(mask, (*i, row))),
                weights,
                heads,
                _at(residual, (*i, row)),
                _at(dropout, (*i, row)),
                scratch,
            )


_PARAMETERS = (
    "Tensor norm_weight, Tensor norm_bias, Tensor query_weight, Tensor key_weight, Tensor value_weight, "
    "Tensor? gate_weight, Tensor? gate_bias, Tensor output_weight, Tensor output_bias"
)


@torch.library.custom_op(
    "fastfold::gated_attention",
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, Tensor? mask, int heads, Tensor? residual, bool add_x, Tensor? dropout, "
    f"str backend, {_PARAMETERS}) -> Tensor",
)
def _gated_attention(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    heads: int,
    residual: Tensor | None,
    add_x: bool,
    dropout: Tensor | None,
    backend: str,
    *parameters: Tensor | None,
) -> Tensor:
    out = torch.empty_like(x)
    _fill(out, x, bias, mask, heads, x if add_x else residual, dropout, parameters, backend, Scratch())
    return out


@_gated_attention.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(
    "fastfold::gated_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor? bias, Tensor? mask, int heads, bool add_x, Tensor? dropout, "
    f"str backend, bool need_bias, {_PARAMETERS}) -> Tensor[]",
)
@without_autocast
def _gated_attention_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    heads: int,
    add_x: bool,
    dropout: Tensor | None,
    backend: str,
    need_bias: bool,
    *parameters: Tensor | None,
) -> list[Tensor]:
    """Gradients of x, bias and the parameters; those of the last two where they are given and needed."""
    blocks, exact = _blocks(backend), exact_dtype(x)
    grad_bias = bias.new_zeros(bias.shape, dtype=exact) if bias is not None and need_bias else None
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(parameters, blocks.backward_dtype(x))
    totals = arrange([p if p is None else torch.zeros_like(p, dtype=exact) for p in parameters], exact)
    scratch = Scratch().of(x, blocks.backward_dtype(x))
    grad_x = torch.empty_like(x)
    for i in itertools.product(*map(range, x.shape[:-3])):
        for row in _rows(x[i], blocks.row_step(x[i])):
            b_grad = scratch.copy("grad_update", grad[i][row])
            if dropout is not None:
                b_grad.mul_(dropout[i][row])
            operands = (x[i][row], _at(bias, i), _at(mask, (*i, row)))
            b_grad_x = blocks.backward_block(
                b_grad, operands, _at(grad_bias, i), weights, totals, heads, scratch
            )
            finish(grad_x[i][row], b_grad_x, grad[i][row] if add_x else None, None)
    query, key, value, *gate = totals.merged.unbind(0)
    gates = (gate[0] if gate else None, totals.gate_bias)
    grads = (*totals.norm, query, key, value, *gates, totals.output, totals.output_bias)
    # Copies, because an operator returns no views of one tensor.
    found = [
        g.to(p.dtype, copy=True)
        for g, p in zip(grads, parameters, strict=True)
        if g is not None and p is not None
    ]
    return [grad_x, *([] if grad_bias is None else [grad_bias]), *found]


@_gated_attention_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    heads: int,
    add_x: bool,
    dropout: Tensor | None,
    backend: str,
    need_bias: bool,
    *parameters: Tensor | None,
) -> list[Tensor]:
    biases = [] if bias is None or not need_bias else [bias.new_empty(bias.shape, dtype=exact_dtype(x))]
    return [torch.empty_like(x), *biases, *(p.new_empty(p.shape) for p in parameters if p is not None)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep inputs alone: projections and weights are recomputed."""
    x, bias, mask, ctx.heads, _, ctx.add_x, dropout, ctx.backend, *parameters = inputs
    ctx.save_for_backward(x, bias, mask, dropout, *parameters)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Read once: activation checkpointing hands saved tensors out a single time.
    x, bias, mask, dropout, *parameters = ctx.saved_tensors
    needs = ctx.needs_input_grad
    need_bias = bias is not None and needs[1]
    found = iter(
        _gated_attention_backward(
            grad, x, bias, mask, ctx.heads, ctx.add_x, dropout, ctx.backend, need_bias, *parameters
        )
    )
    grad_x, grad_bias = next(found), next(found) if need_bias else None
    of_parameters = (None if p is None else next(found) for p in parameters)
    grads = (grad_x, grad_bias, None, None, grad, None, None, None, *of_parameters)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


_gated_attention.register_autograd(_differentiate, setup_context=_keep)


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
    backend: str | None = None,
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
        backend: ``auto``, ``triton`` or ``torch``; see :func:`fastfold.kernels.attention`.

    Returns:
        The update ``[*, R, N, c]``, plus the residual, in the dtype and memory layout of ``x``.

    Raises:
        InputError: Bias or mask have another shape.
        ConfigError: There is no such backend, or it cannot run here.
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    *lead, rows, length, _ = x.shape
    for name, tensor, shape in (
        ("bias", bias, (*lead, heads, length, length)),
        ("mask", mask, (*lead, rows, length)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(
                f"gated_attention: {name} is {list(tensor.shape)}; give {list(shape)} for x {list(x.shape)}"
            )
    backend = attention_backend(x, len(query_weight) // heads, backend)
    projections = (query_weight, key_weight, value_weight, gate_weight, gate_bias)
    parameters = (norm_weight, norm_bias, *projections, output_weight, output_bias)
    if out is None:
        rest = (None if residual is x else residual, residual is x, dropout, backend)
        return _gated_attention(x, bias, mask, heads, *rest, *parameters)
    refuse_gradients(x, bias, residual, *parameters)
    _fill(out, x, bias, mask, heads, residual, dropout, parameters, backend, scratch or Scratch())
    return out
