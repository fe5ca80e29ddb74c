"""Gated self-attention as one operator: norm, merged projections, attention, gate, output.

It is also an operator in two parts, for callers that wait for the bias: projections of the first block of rows, which
need only ``x``, and the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from fastfold.errors import InputError
from fastfold.kernels.common import cuequivariance
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost, size_in_bytes
from fastfold.kernels.common.layout import MAX_HEAD_CHANNELS, part
from fastfold.kernels.common.operator import BackwardPass, define_operator, kept_memory
from fastfold.kernels.common.parameters import like_first
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    autocast_is_enabled,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.common.shapes import Shape, axes_of, check_shapes
from fastfold.kernels.cpu.linear import can_keep, product_dtype
from fastfold.kernels.ops.attention.op import attention_definition
from fastfold.kernels.ops.gated_attention import passes
from fastfold.kernels.ops.gated_attention.eager import (
    GatedAttentionParams,
    Kept,
    RowBlock,
    arrange,
    centered_on,
    kept_elements,
)
from fastfold.kernels.ops.gated_attention.passes import blocks_of, row_blocks
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition


def gated_attention_definition(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, *, heads: int, **parameters: Tensor | None
) -> Tensor:
    """Compute :func:`gated_attention` by its specification, from its :class:`~.eager.GatedAttentionParams`."""
    exact = accumulation_dtype(x)
    exact_parameters: dict[str, Any] = {k: None if p is None else p.to(exact) for k, p in parameters.items()}
    w = GatedAttentionParams(**exact_parameters)
    normed = layer_norm_definition(x.to(exact), w.norm_weight, w.norm_bias)

    def project(weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(normed, weight, bias).unflatten(-1, (heads, -1))

    q, k, v = project(w.query_weight), project(w.key_weight), project(w.value_weight)
    gate = None if w.gate_weight is None else project(w.gate_weight, w.gate_bias)
    out = attention_definition(q, k, v, bias, mask, gate).flatten(-2)
    return linear(out, w.output_weight, w.output_bias).to(x.dtype)


def _forward(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    heads: int,
    add_x: bool,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the result, and with ``keep`` the memory of :class:`~.eager.Kept` for the backward pass."""
    operands = RowBlock(x, bias, mask, x if add_x else residual, dropout)
    group = GatedAttentionParams.of(parameters)
    memory = _empty_kept(x, group, heads, keep)
    kept = Kept.of(memory, x, group, heads) if keep else None
    out = passes.forward(torch.empty_like(x), operands, group, heads=heads, backend=backend, kept=kept)
    return out, memory


def _empty_kept(x: Tensor, parameters: GatedAttentionParams, heads: int, keep: bool) -> Tensor:
    return x.new_empty(sum(kept_elements(x, parameters, heads)) if keep else 0)


def _fake(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    heads: int,
    keep: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _empty_kept(x, GatedAttentionParams.of(parameters), heads, keep)


_BEGIN_LAUNCHES = 2  #: Kernels of a beginning: norm and product


def gated_attention_flops(
    rows: int, length: int, channels: int, width: int | None = None, *, gated: bool = True
) -> tuple[float, float, float]:
    """Return operations of :func:`fastfold.kernels.gated_attention`: projections, attention and output.

    Rows are those of all batch elements, the width the channels of all heads, by default those of ``x``.
    """
    width = channels if width is None else width
    one = 2.0 * rows * length * channels * width
    return (3 + gated) * one, 4.0 * rows * length**2 * width, one


def _flops(call: Arguments) -> tuple[float, float, float]:
    """Return the operations of a call of any operator of gated attention, with or without gate."""
    *rows, length, channels = call["x"].shape
    p = GatedAttentionParams.of(call["parameters"])
    width, gated = len(p.query_weight), p.gate_weight is not None
    return gated_attention_flops(math.prod(rows), length, channels, width, gated=gated)


def _scores(call: Arguments) -> float:
    """Return the number of scores of a call; each has an exponential."""
    *rows, length, _ = call["x"].shape
    return float(math.prod(rows) * length**2 * call["heads"])


def _cost(call: Arguments) -> OperatorCost:
    # Queries, keys, values, gate and attended values of a block of rows go through memory.
    return OperatorCost(
        sum(_flops(call)), 10 * size_in_bytes(call["x"]), launches=6, exponentials=_scores(call)
    )


def _without_projections(call: Arguments, projections: float, whole: OperatorCost) -> OperatorCost:
    """Subtract a number of projections from a call's cost."""
    if not projections:
        return whole
    done = 2.0 * projections * call["x"].shape[-1]
    return replace(whole, flops=whole.flops - done, launches=whole.launches - _BEGIN_LAUNCHES)


def _last_elements(tensors: Sequence[Tensor]) -> int:
    """Return the number of projections of some rows or all in the last of ``tensors``."""
    return tensors[-1].numel() if tensors else 0


def _backward_cost(call: Arguments) -> OperatorCost:
    projections, attention, output = _flops(call)
    of_parameters, saved, exponentials = any(call["needs"][2:]), call["out"], _scores(call)
    flops = (2 + of_parameters) * projections + 3.5 * attention + (1 + of_parameters) * output
    known = _last_elements(saved)
    if len(saved) == 1:
        group = GatedAttentionParams.of(call["parameters"])
        known, weights = kept_elements(call["x"], group, call["heads"])
        if weights:
            flops, exponentials = flops - 0.5 * attention, 0.0
    traffic = 25 * size_in_bytes(call["x"])
    whole = OperatorCost(flops, traffic, launches=14, exponentials=exponentials)
    return _without_projections(call, known, whole)


_gated_attention = define_operator(
    "gated_attention",
    _forward,
    BackwardPass(
        passes.compute_gradients,
        ("x", "bias", "parameters"),
        fake=passes.fake_gradients,
        cost=_backward_cost,
        residual="residual",
        saved_result=kept_memory,
        arrange=passes.arrange_gradients,
    ),
    fake=_fake,
    cost=_cost,
)


def attention_bias(bias: Tensor, channels: int, *, backend: str | None = None) -> Tensor:
    """Lay out ``bias [*, H, N, N]`` as :func:`gated_attention` reads it, so that many calls share one copy.

    ``channels`` is their number in each head, and ``backend`` that of :func:`gated_attention`. The numbers stay; for
    Triton without gradients, rows begin at multiples of 16 elements, whatever N is.

    Example:
        >>> import torch
        >>> from fastfold.kernels import attention_bias
        >>> bias = torch.randn(5, 5, 4).permute(2, 0, 1)  # 4 heads, which are innermost in memory
        >>> shared = attention_bias(bias, channels=8)
        >>> torch.equal(shared, bias), bias.stride(), shared.stride()
        (True, (1, 20, 4), (25, 5, 1))
    """
    if (
        torch.is_grad_enabled()
        or choose_backend(bias, backend, fits=channels <= MAX_HEAD_CHANNELS) == "torch"
    ):
        return bias.contiguous()
    from fastfold.kernels.ops.attention.triton_fwd import aligned

    return aligned(bias)


def gated_attention(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    parameters: GatedAttentionParams,
    *,
    heads: int,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    at_once: bool = False,
    keep: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute self-attention within every row, as a residual branch: ``(attention(LN(x)) · sigmoid(gate)) Oᵀ + o``.

    This is AlphaFold's MSA row and column attention (supplementary algorithms 7 and 8) and triangle attention (13 and
    14), without the projection of the pair bias. For columns pass transposed views: no copy is made.

    Args:
        x: ``[*, R, N, c]``; attention is along N.
        bias: Added to the scaled scores of every row, ``[*, H, N, N]``, or None; see :func:`attention`.
        mask: Keys to use (not 0) and to leave out (0), ``[*, R, N]``, or None; see :func:`attention`.
        parameters: Norm, projections of queries, keys, values and gate, and the output projection.
        heads: H.
        residual: ``[*, R, N, c]`` to add to the update, usually ``x`` itself.
        dropout: Factors of the update that broadcast against ``x`` (zero or 1 / keep rate). Gets no gradient.
        out: Tensor for the result, without recording gradients; may be ``x`` or ``residual``.
        scratch: With ``out``: buffers to use, which the next operator can reuse.
        at_once: With ``out``: let Triton project all rows at once, rather than at most 2^17 positions. The buffers
            then have about 6 times the elements of ``x``.
        keep: While gradients are recorded, let PyTorch's path keep projections for the backward pass, which has less to
            compute then. They have 3 or 4 times the elements of ``x``, with as many channels as the heads. In bfloat16
            the weights of the keys may be kept too, unless they have more elements.
        backend: ``auto``, ``triton`` or ``torch``; see :func:`fastfold.kernels.attention`. ``cueq`` is NVIDIA's
            cuEquivariance if there is a bias, and ``auto`` otherwise.

    Returns:
        The update ``[*, R, N, c]``, plus the residual, in the dtype and memory layout of ``x``.

    Raises:
        InputError: A shape does not match that of ``x``, or the heads do not divide the channels of the queries.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import GatedAttentionParams, gated_attention
        >>> norm, plain = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)
        >>> query, key, value = plain.in_proj_weight.chunk(3)  # the biases of a new layer are zero
        >>> output = plain.out_proj.parameters()
        >>> parameters = GatedAttentionParams(*norm.parameters(), query, key, value, None, None, *output)
        >>> x = torch.randn(3, 5, 16)
        >>> found = gated_attention(x, None, None, parameters, heads=4, residual=x)
        >>> torch.allclose(found, x + plain(norm(x), norm(x), norm(x))[0], atol=1e-5)
        True
    """
    check = _check if type(x) is Tensor and not is_dynamo_compiling() else _check.__wrapped__
    check(
        (heads, x.dtype),
        x.shape,
        None if bias is None else bias.shape,
        None if mask is None else mask.shape,
        None if residual is None else residual.shape,
        None if out is None else out.shape,
        *map(getattr, parameters, repeat("shape"), repeat(None)),
    )
    if out is not None and torch.is_grad_enabled():
        refuse_gradients(x, bias, residual, *parameters)
    fits = parameters.query_weight.shape[0] // heads <= MAX_HEAD_CHANNELS
    backend = choose_backend(x, backend, fits=fits, cueq=bias is not None)
    if bias is not None and backend == "cueq":
        cuequivariance.check_support(x)
        update = cuequivariance.gated_attention(x, bias, mask, parameters, heads)
        return cuequivariance.add_to_residual(update, residual, dropout, out=out)
    if out is None:
        added, group = None if residual is x else residual, parameters.present()
        keep = keep and backend == "torch" and can_keep(x)
        options: dict[str, Any] = {"heads": heads, "add_x": residual is x, "keep": keep, "backend": backend}
        update, _ = _gated_attention(x, bias, mask, added, dropout, group, **options)
        return update
    operands = RowBlock(x, bias, mask, residual, dropout)
    compute = without_autocast(passes.forward) if autocast_is_enabled() else passes.forward
    return compute(out, operands, parameters, heads=heads, backend=backend, scratch=scratch, at_once=at_once)


@functools.lru_cache(maxsize=1024)
def _check(
    kind: tuple[int, torch.dtype],
    x: Shape,
    bias: Shape | None,
    mask: Shape | None,
    residual: Shape | None,
    out: Shape | None,
    *parameters: Shape | None,
) -> None:
    heads, dtype = kind
    *lead, rows, length, c = axes_of("gated_attention", "x", x, "R, N, c", dtype)
    width = axes_of("gated_attention", "output_weight", parameters[-2] or (), "c, H D")[-1]
    projection = width, c
    shapes = (c,), (c,), projection, projection, projection, projection, (width,), (c, width), (c,)
    wanted = (
        ("bias", bias, (*lead, heads, length, length)),
        ("mask", mask, (*lead, rows, length)),
        ("residual", residual, x),
        ("out", out, x),
        *zip(GatedAttentionParams._fields, parameters, shapes, strict=True),
    )
    check_shapes("gated_attention", "x", x, wanted)
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise InputError(
            f"gated_attention: heads must divide the {width} channels of the queries, found {heads!r}"
        )


def _compute_beginning(
    x: Tensor, parameters: Sequence[Tensor], *, heads: int, backend: str, backward: bool
) -> list[Tensor]:
    blocks, params = blocks_of(backend), GatedAttentionParams.of(parameters)
    for _, rows in row_blocks(x, blocks.row_step):
        if backward:
            dtype = blocks.backward_dtype(x)
            step = blocks.gradient_step(arrange(params, dtype), heads, needs_parameters=False)
            return step.begin(part(x, rows), Scratch().of(x, dtype))
        weights = centered_on(x, arrange(params, x.dtype))
        scratch = Scratch().of(x, product_dtype(x))
        projected = blocks.forward_step(weights, heads).begin(part(x, rows), scratch)
        return [projected.to(x.dtype)]
    return []  # there are no rows


def _begin_fake(
    x: Tensor, parameters: Sequence[Tensor], *, heads: int, backend: str, backward: bool
) -> list[Tensor]:
    blocks, params = blocks_of(backend), GatedAttentionParams.of(parameters)
    for _, rows in row_blocks(x, blocks.row_step):
        first = part(x, rows)
        dtype = blocks.backward_dtype(x) if backward else x.dtype
        width = len(params.query_weight) // heads
        projected = (*first.shape[:2], 3 if params.gate_weight is None else 4, heads, width)
        normalized = blocks.empty_normalized(first) if backward else []
        return [*normalized, x.new_empty(projected, dtype=dtype)]
    return []


def _begin_cost(call: Arguments) -> OperatorCost:
    x = call["x"]
    for _, rows in row_blocks(x, blocks_of(call["backend"]).row_step):
        return OperatorCost(_flops(call)[0] * part(x, rows).numel() / x.numel(), launches=_BEGIN_LAUNCHES)
    return OperatorCost(0.0)


_begin = define_operator("gated_attention_begin", _compute_beginning, fake=_begin_fake, cost=_begin_cost)


def gated_attention_begin(
    x: Tensor, parameters: GatedAttentionParams, *, heads: int, backend: str, backward: bool = False
) -> list[Tensor]:
    """Compute the values of :func:`fastfold.kernels.gated_attention` for its first block of rows that need only ``x``.

    No gradients are recorded. ``fastfold::gated_attention_begun`` continues from the result. With ``backward``, the
    backward pass is started, which ``fastfold::gated_attention_backward`` continues. The backend is ``triton`` or
    ``torch``.

    Returns:
        Projections of the block; for the backward pass, the normalised block before them. Empty without rows.
    """
    projections: list[Tensor] = _begin(
        x, parameters.present(), heads=heads, backend=backend, backward=backward
    )
    return projections


def _continue(
    x: Tensor,
    projections: Sequence[Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    heads: int,
    backend: str,
) -> Tensor:
    """Return ``x`` plus its update, continuing after :func:`gated_attention_begin`; records no gradients."""
    return passes.forward(
        torch.empty_like(x),
        RowBlock(x, bias, mask, x, dropout),
        GatedAttentionParams.of(parameters),
        heads=heads,
        backend=backend,
        projections=projections,
    )


def _begun_cost(call: Arguments) -> OperatorCost:
    return _without_projections(call, _last_elements(call["projections"]), _cost(call))


define_operator("gated_attention_begun", _continue, fake=like_first, cost=_begun_cost)
