"""Gated self-attention with everything around it: norm, merged projections, attention, gate, output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.errors import InputError
from fastfold.kernels.common.block_threads import MAX_LANES, for_blocks
from fastfold.kernels.common.cost import Arguments, OperatorCost, declares_cost, size_in_bytes
from fastfold.kernels.common.layout import batch_elements, part
from fastfold.kernels.common.parameters import grads_or_none, like_first
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    finish,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.ops.attention.op import attention_backend, attention_definition
from fastfold.kernels.ops.gated_attention.eager import (
    GatedAttentionParams,
    RowBlock,
    Weights,
    arrange,
    gradients_of,
    zeros_like,
)
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition


def gated_attention_definition(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, *, heads: int, **parameters: Tensor | None
) -> Tensor:
    """Specification of :func:`gated_attention`, with its :class:`~.eager.GatedAttentionParams`."""
    exact = accumulation_dtype(x)
    given: dict[str, Any] = {k: None if p is None else p.to(exact) for k, p in parameters.items()}
    w = GatedAttentionParams(**given)
    normed = layer_norm_definition(x.to(exact), w.norm_weight, w.norm_bias)

    def project(weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(normed, weight, bias).unflatten(-1, (heads, -1))

    q, k, v = project(w.query_weight), project(w.key_weight), project(w.value_weight)
    gate = None if w.gate_weight is None else project(w.gate_weight, w.gate_bias)
    out = attention_definition(q, k, v, bias, mask, gate).flatten(-2)
    return linear(out, w.output_weight, w.output_bias).to(x.dtype)


def _blocks(backend: str) -> Any:
    """The module with the blocks of a backend."""
    if backend == "triton":
        from fastfold.kernels.ops.gated_attention import triton_launch

        return triton_launch
    from fastfold.kernels.ops.gated_attention import eager

    return eager


_Index = tuple[int | slice, ...]

LONG_ROW = 4096
"""Positions of the longest row of which each thread makes blocks of its own."""


def _row_blocks(x: Tensor, step: Callable[[Tensor], int]) -> Iterator[tuple[_Index, _Index]]:
    """Indices of the batch elements of ``x``, each with those of its blocks of rows."""
    for i in batch_elements(x):
        rows, size = x.shape[-3], step(part(x, i))
        for r in range(0, rows, size):
            yield i, i if size >= rows else (*i, slice(r, r + size))


@without_autocast
def _fill(
    out: Tensor,
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    parameters: GatedAttentionParams,
    *,
    heads: int,
    residual: Tensor | None,
    dropout: Tensor | None,
    backend: str,
    scratch: Scratch,
    begun: Sequence[Tensor] = (),
) -> Tensor:
    """Fill ``out``; projections, scores and output exist for one block of rows at a time.

    Of the first block the projections may have ``begun``.
    """
    blocks = _blocks(backend)
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(parameters, x.dtype)
    forward = blocks.Forward(weights, heads)

    def block(scratch: Scratch, i: _Index, rows: _Index, begun: Sequence[Tensor]) -> None:
        own = RowBlock(part(x, rows), part(bias, i), *(part(t, rows) for t in (mask, residual, dropout)))
        forward(part(out, rows), own, scratch, *begun)

    # The buffers of a block grow with a row that is longer than its positions; all cores then share one.
    lanes = MAX_LANES if backend == "torch" and x.shape[-2] <= LONG_ROW else 1
    first = itertools.chain([begun], itertools.repeat(()))
    indices = ((*index, given) for index, given in zip(_row_blocks(x, blocks.row_step), first, strict=False))
    for_blocks(block, indices, scratch.of(x), lanes=lanes)
    return out


_PARAMETERS = (
    "Tensor norm_weight, Tensor norm_bias, Tensor query_weight, Tensor key_weight, Tensor value_weight, "
    "Tensor? gate_weight, Tensor? gate_bias, Tensor output_weight, Tensor output_bias"
)


@torch.library.custom_op(
    "fastfold::gated_attention",
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, Tensor? mask, Tensor? residual, Tensor? dropout, "
    f"{_PARAMETERS}, *, int heads, bool add_x, str backend) -> Tensor",
)
def _gated_attention(x: Tensor, *others: Tensor | None, heads: int, add_x: bool, backend: str) -> Tensor:
    bias, mask, residual, dropout, *parameters = others
    return _fill(
        torch.empty_like(x),
        *(x, bias, mask, GatedAttentionParams._make(parameters)),
        heads=heads,
        residual=x if add_x else residual,
        dropout=dropout,
        backend=backend,
        scratch=Scratch(),
    )


_gated_attention.register_fake(like_first)


@torch.library.custom_op(
    "fastfold::gated_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor[] begun, Tensor? bias, Tensor? mask, Tensor? dropout, "
    f"{_PARAMETERS}, *, int heads, bool add_x, str backend, bool need_bias) -> Tensor[]",
)
@without_autocast
def _gated_attention_backward(
    grad: Tensor,
    x: Tensor,
    begun: Sequence[Tensor],
    *others: Tensor | None,
    heads: int,
    add_x: bool,
    backend: str,
    need_bias: bool,
) -> list[Tensor]:
    """Gradients of x, of the bias if it is given and needed, and of the parameters as in :class:`Weights`.

    ``begun`` is what :func:`gated_attention_begin` returns for the backward pass, or empty.
    """
    bias, mask, dropout, *parameters = others
    given = GatedAttentionParams._make(parameters)
    blocks, exact = _blocks(backend), accumulation_dtype(x)
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(given, blocks.backward_dtype(x))
    scratch = Scratch().of(x, blocks.backward_dtype(x))
    grad_x, grad_bias, totals = torch.empty_like(x), None, None
    if bias is not None and need_bias:
        grad_bias = torch.empty(bias.shape, dtype=exact, device=bias.device)
    before: _Index | None = None
    for i, rows in _row_blocks(x, blocks.row_step):
        own = RowBlock(
            part(x, rows),
            part(bias, i),
            part(mask, rows),
            dropout=None if dropout is None else part(dropout, rows),
        )
        bias_total = part(grad_bias, i)
        block_grad, totals = blocks.backward_block(
            *(part(grad, rows), own, bias_total, i != before, weights, totals),
            heads=heads,
            scratch=scratch,
            begun=begun,
        )
        begun = ()
        finish(part(grad_x, rows), block_grad, part(grad, rows) if add_x else None, None)
        before = i
    if totals is None:  # there are no rows
        totals = zeros_like(weights, exact)
        grad_bias = None if grad_bias is None else grad_bias.zero_()
    found = zip(_flat(totals), _flat(_first_of_each(given)), strict=True)
    of_parameters = [g.to(p.dtype) for g, p in found if g is not None and p is not None]
    return [grad_x, *([] if grad_bias is None else [grad_bias]), *of_parameters]


@torch.library.custom_op(
    "fastfold::gated_attention_begin",
    mutates_args=(),
    schema=f"(Tensor x, {_PARAMETERS}, *, int heads, str backend, bool backward) -> Tensor[]",
)
@without_autocast
def _gated_attention_begin(
    x: Tensor, *parameters: Tensor | None, heads: int, backend: str, backward: bool
) -> list[Tensor]:
    blocks, given = _blocks(backend), GatedAttentionParams._make(parameters)
    for _, rows in _row_blocks(x, blocks.row_step):
        if backward:
            dtype = blocks.backward_dtype(x)
            return blocks.begin_backward(part(x, rows), arrange(given, dtype), heads, Scratch().of(x, dtype))
        begun = blocks.Forward(arrange(given, x.dtype), heads).begin(part(x, rows), Scratch().of(x))
        return [begun.to(x.dtype)]
    return []  # there are no rows


@_gated_attention_begin.register_fake
def _begin_fake(
    x: Tensor, *parameters: Tensor | None, heads: int, backend: str, backward: bool
) -> list[Tensor]:
    blocks, given = _blocks(backend), GatedAttentionParams._make(parameters)
    for _, rows in _row_blocks(x, blocks.row_step):
        first = part(x, rows)
        dtype = blocks.backward_dtype(x) if backward else x.dtype
        width = len(given.query_weight) // heads
        projected = (*first.shape[:2], 3 if given.gate_weight is None else 4, heads, width)
        shapes = [*(blocks.normalised_shapes(first) if backward else []), projected]
        return [x.new_empty(shape, dtype=dtype) for shape in shapes]
    return []


def gated_attention_begin(
    x: Tensor, parameters: GatedAttentionParams, *, heads: int, backend: str, backward: bool = False
) -> list[Tensor]:
    """Compute what :func:`gated_attention` needs of ``x`` alone, for its first block of rows; records no gradients.

    For who waits for the bias meanwhile: ``fastfold::gated_attention_begun`` goes on from there.

    Args:
        x: ``[*, R, N, c]``.
        parameters: As of :func:`gated_attention`.
        heads: H.
        backend: ``triton`` or ``torch``.
        backward: Whether it is the backward pass that begins: ``fastfold::gated_attention_backward`` goes on.

    Returns:
        Projections of the block; before them, for the backward pass, the normalised block. Nothing for no rows.
    """
    found: list[Tensor] = _gated_attention_begin(
        x, *parameters, heads=heads, backend=backend, backward=backward
    )
    return found


@torch.library.custom_op(
    "fastfold::gated_attention_begun",
    mutates_args=(),
    schema="(Tensor x, Tensor[] begun, Tensor? bias, Tensor? mask, Tensor? dropout, "
    f"{_PARAMETERS}, *, int heads, str backend) -> Tensor",
)
def _gated_attention_begun(
    x: Tensor, begun: Sequence[Tensor], *others: Tensor | None, heads: int, backend: str
) -> Tensor:
    """``x`` plus its update, of which :func:`gated_attention_begin` has made the beginning; records no gradients."""
    bias, mask, dropout, *parameters = others
    return _fill(
        *(torch.empty_like(x), x, bias, mask, GatedAttentionParams._make(parameters)),
        heads=heads,
        residual=x,
        dropout=dropout,
        backend=backend,
        scratch=Scratch(),
        begun=begun,
    )


_gated_attention_begun.register_fake(like_first)


def _flat(weights: Weights) -> tuple[Tensor | None, ...]:
    return (*weights.norm, weights.merged, weights.gate_bias, weights.output, weights.output_bias)


def _first_of_each(parameters: GatedAttentionParams) -> Weights:
    """Of the parameters that are merged the first, in the places of :class:`Weights`."""
    p = parameters
    return Weights((p.norm_weight, p.norm_bias), p.query_weight, p.gate_bias, p.output_weight, p.output_bias)


def gradients_of_parameters(
    found: Iterable[Tensor], parameters: Sequence[Tensor | None]
) -> GatedAttentionParams:
    """What the backward operator returns behind the gradients of x and bias, as those of the parameters; views."""
    p, rest = GatedAttentionParams._make(parameters), iter(found)
    norm, merged = (next(rest), next(rest)), next(rest)
    gate_bias = None if p.gate_bias is None else next(rest)
    return gradients_of(Weights(norm, merged, gate_bias, next(rest), next(rest)))


@_gated_attention_backward.register_fake
def _backward_fake(
    grad: Tensor, x: Tensor, begun: Sequence[Tensor], *others: Tensor | None, need_bias: bool, **options: Any
) -> list[Tensor]:
    bias, _, _, *parameters = others
    p = GatedAttentionParams._make(parameters)
    biases = []
    if bias is not None and need_bias:
        biases.append(bias.new_empty(bias.shape, dtype=accumulation_dtype(x)))
    merged = (3 + (p.gate_weight is not None)) * len(p.query_weight), x.shape[-1]
    shapes = [
        None if first is None else merged if first is p.query_weight else first.shape
        for first in _flat(_first_of_each(p))
    ]
    firsts = zip(_flat(_first_of_each(p)), shapes, strict=True)
    return [
        torch.empty_like(x),
        *biases,
        *(first.new_empty(shape) for first, shape in firsts if first is not None and shape is not None),
    ]


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    """Keep inputs alone: projections and weights are recomputed."""
    x, bias, mask, _, dropout, *parameters = inputs
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(x, bias, mask, dropout, *parameters)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Read once: activation checkpointing hands saved tensors out a single time.
    x, bias, mask, dropout, *parameters = ctx.saved_tensors
    need_bias = bias is not None and ctx.needs_input_grad[1]
    tensors = (bias, mask, dropout, *parameters)
    found = iter(_gated_attention_backward(grad, x, [], *tensors, **ctx.options, need_bias=need_bias))
    grad_x, grad_bias = next(found), next(found) if need_bias else None
    grads = (grad_x, grad_bias, None, grad, None, *gradients_of_parameters(found, parameters))
    return tuple(grads_or_none(grads, ctx.needs_input_grad))


_gated_attention.register_autograd(_backward, setup_context=_setup_context)


def gated_attention_flops(
    rows: int, length: int, channels: int, width: int | None = None, *, gated: bool = True
) -> tuple[float, float, float]:
    """Operations of :func:`gated_attention`: of the projections of ``x``, of the attention, of the output.

    Args:
        rows: Rows, of all batch elements.
        length: Positions of a row.
        channels: Channels of ``x``.
        width: Channels of all heads; by default those of ``x``.
        gated: Whether there is a gate.
    """
    width = channels if width is None else width
    one = 2.0 * rows * length * channels * width
    return (3 + gated) * one, 4.0 * rows * length**2 * width, one


def _flops(call: Arguments) -> tuple[float, float, float]:
    *rows, length, channels = call["x"].shape
    width, gated = call["query_weight"].shape[0], call["gate_weight"] is not None
    return gated_attention_flops(math.prod(rows), length, channels, width, gated=gated)


@declares_cost("gated_attention")
def _cost(call: Arguments) -> OperatorCost:
    # Queries, keys, values, gate and attended values of a block of rows go through memory.
    return OperatorCost(sum(_flops(call)), 10 * size_in_bytes(call["x"]), launches=6)


_BEGUN = 2
"""Kernels of a beginning: norm and product."""


@declares_cost("gated_attention_begin")
def _begin_cost(call: Arguments) -> OperatorCost:
    x = call["x"]
    for _, rows in _row_blocks(x, _blocks(call["backend"]).row_step):
        return OperatorCost(_flops(call)[0] * part(x, rows).numel() / x.numel(), launches=_BEGUN)
    return OperatorCost(0.0)


@declares_cost("gated_attention_begun")
def _begun_cost(call: Arguments) -> OperatorCost:
    return _without_beginning(call, _cost(call))


def _without_beginning(call: Arguments, whole: OperatorCost) -> OperatorCost:
    """What is left of an operator's cost when the projections of its first block are there."""
    if not call["begun"]:
        return whole
    done = 2.0 * call["begun"][-1].numel() * call["x"].shape[-1]
    return replace(whole, flops=whole.flops - done, launches=whole.launches - _BEGUN)


@declares_cost("gated_attention_backward")
def _backward_cost(call: Arguments) -> OperatorCost:
    projections, attention, output = _flops(call)
    flops = 3 * projections + 3.5 * attention + 2 * output
    return _without_beginning(call, OperatorCost(flops, 25 * size_in_bytes(call["x"]), launches=14))


def attention_bias(bias: Tensor, channels: int, *, backend: str | None = None) -> Tensor:
    """``bias`` as :func:`gated_attention` reads it: one that serves many calls is copied once, not in each of them.

    Args:
        bias: ``[*, H, N, N]``, with any strides.
        channels: Of each head.
        backend: As of :func:`gated_attention`.

    Returns:
        The same numbers; for Triton with rows that begin at multiples of 16 elements, whatever N is.
    """
    if attention_backend(bias, channels, backend) == "torch":
        return bias.contiguous()
    from fastfold.kernels.ops.attention.triton_fwd import aligned

    return aligned(bias)


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
        bias: Added to the scaled scores of every row, ``[*, H, N, N]``, or None; see :func:`attention`.
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
    parameters = GatedAttentionParams(
        *(norm_weight, norm_bias, query_weight, key_weight, value_weight),
        *(gate_weight, gate_bias, output_weight, output_bias),
    )
    if out is None:
        tensors = (x, bias, mask, None if residual is x else residual, dropout, *parameters)
        return _gated_attention(*tensors, heads=heads, add_x=residual is x, backend=backend)
    refuse_gradients(x, bias, residual, *parameters)
    return _fill(
        *(out, x, bias, mask, parameters),
        heads=heads,
        residual=residual,
        dropout=dropout,
        backend=backend,
        scratch=scratch or Scratch(),
    )
