"""Gated attention in two parts: projections of the first block of rows, which need only ``x``, and the rest.

For callers that wait for the bias meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastfold.kernels.common.cost import Arguments, OperatorCost
from fastfold.kernels.common.layout import part
from fastfold.kernels.common.operator import define_operator
from fastfold.kernels.common.parameters import like_first
from fastfold.kernels.common.scratch import Scratch, without_autocast
from fastfold.kernels.ops.gated_attention import passes
from fastfold.kernels.ops.gated_attention.cost import (
    BEGIN_LAUNCHES,
    flops_of,
    forward_cost,
    without_beginning,
)
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams, RowBlock, arrange, centred_on
from fastfold.kernels.ops.gated_attention.passes import blocks_of, row_blocks


@without_autocast
def _compute_beginning(
    x: Tensor, parameters: Sequence[Tensor], *, heads: int, backend: str, backward: bool
) -> list[Tensor]:
    blocks, given = blocks_of(backend), GatedAttentionParams.of(parameters)
    for _, rows in row_blocks(x, blocks.row_step):
        if backward:
            dtype = blocks.backward_dtype(x)
            step = blocks.Backward(arrange(given, dtype), heads)
            return step.begin(part(x, rows), Scratch().of(x, dtype))
        weights = centred_on(x, arrange(given, x.dtype))
        begun = blocks.Forward(weights, heads).begin(part(x, rows), Scratch().of(x))
        return [begun.to(x.dtype)]
    return []  # there are no rows


def _begin_fake(
    x: Tensor, parameters: Sequence[Tensor], *, heads: int, backend: str, backward: bool
) -> list[Tensor]:
    blocks, given = blocks_of(backend), GatedAttentionParams.of(parameters)
    for _, rows in row_blocks(x, blocks.row_step):
        first = part(x, rows)
        dtype = blocks.backward_dtype(x) if backward else x.dtype
        width = len(given.query_weight) // heads
        projected = (*first.shape[:2], 3 if given.gate_weight is None else 4, heads, width)
        shapes = [*(blocks.normalised_shapes(first) if backward else []), projected]
        return [x.new_empty(shape, dtype=dtype) for shape in shapes]
    return []


def _begin_cost(call: Arguments) -> OperatorCost:
    x = call["x"]
    for _, rows in row_blocks(x, blocks_of(call["backend"]).row_step):
        return OperatorCost(flops_of(call)[0] * part(x, rows).numel() / x.numel(), launches=BEGIN_LAUNCHES)
    return OperatorCost(0.0)


_begin = define_operator("gated_attention_begin", _compute_beginning, fake=_begin_fake, cost=_begin_cost)


def gated_attention_begin(
    x: Tensor, parameters: GatedAttentionParams, *, heads: int, backend: str, backward: bool = False
) -> list[Tensor]:
    """Compute the values of :func:`fastfold.kernels.gated_attention` for its first block of rows that need only ``x``.

    No gradients are recorded. ``fastfold::gated_attention_begun`` continues from the result. With ``backward``, the
    backward pass is begun, which ``fastfold::gated_attention_backward`` continues. The backend is ``triton`` or
    ``torch``.

    Returns:
        Projections of the block; for the backward pass, the normalised block before them. Empty without rows.
    """
    found: list[Tensor] = _begin(x, parameters.present(), heads=heads, backend=backend, backward=backward)
    return found


def _continue(
    x: Tensor,
    begun: Sequence[Tensor],
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
        scratch=Scratch(),
        begun=begun,
    )


def _begun_cost(call: Arguments) -> OperatorCost:
    return without_beginning(call, forward_cost(call))


define_operator("gated_attention_begun", _continue, fake=like_first, cost=_begun_cost)
