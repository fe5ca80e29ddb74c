"""Backward pass of gated attention, block of rows by block of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastfold.kernels.common.cost import Arguments, OperatorCost, size_in_bytes
from fastfold.kernels.common.layout import part
from fastfold.kernels.common.scratch import Scratch, accumulation_dtype, finish, without_autocast
from fastfold.kernels.cpu.block_threads import sum_blocks
from fastfold.kernels.ops.gated_attention.cost import flops_of, scores_of, without_beginning
from fastfold.kernels.ops.gated_attention.eager import (
    GatedAttentionParams,
    RowBlock,
    Weights,
    arrange,
    gradients_of,
    zeros_like,
)
from fastfold.kernels.ops.gated_attention.passes import Index, blocks_of, most_lanes, row_blocks, with_first


@without_autocast
def compute_gradients(
    grad: Tensor,
    x: Tensor,
    begun: Sequence[Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    needs: Sequence[bool],
    heads: int,
    add_x: bool,
    backend: str,
) -> list[Tensor]:
    """Return gradients of ``x``, of the bias if given and needed, and of the parameters as in :class:`~.eager.Weights`.

    Everything is recomputed from the inputs of :func:`fastfold.kernels.gated_attention`, but for ``begun``, a result of
    :func:`~.begin_op.gated_attention_begin` for the backward pass or empty. With ``add_x``, ``x`` is also the residual.
    Of ``needs`` only the bias's is read. The bias's gradient is in the dtype of accumulation.
    """
    given, blocks, exact = GatedAttentionParams.of(parameters), blocks_of(backend), accumulation_dtype(x)
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(given, blocks.backward_dtype(x))._replace(positions=x.shape[:-1].numel())
    step = blocks.Backward(weights, heads)
    # Triton's first block makes the totals.
    sums: list[Any] = [None, None if backend == "triton" else zeros_like(weights, exact)]
    if bias is not None and needs[1]:
        sums[0] = torch.zeros(bias.shape, dtype=exact, device=bias.device)
    grad_x = torch.empty_like(x)

    def block(scratch: Scratch, sums: list[Any], i: Index, rows: Index, begun: Sequence[Tensor]) -> None:
        own = RowBlock(part(x, rows), part(bias, i), part(mask, rows), dropout=part(dropout, rows))
        b_grad, grad_bias = part(grad, rows), part(sums[0], i)
        block_grad, sums[1] = step(b_grad, own, grad_bias, sums[1], scratch, begun)
        finish(part(grad_x, rows), block_grad, b_grad if add_x else None, None)

    blocks_and_begun = with_first(row_blocks(x, blocks.row_step), begun)
    scratch = Scratch().of(x, blocks.backward_dtype(x))
    sum_blocks(block, blocks_and_begun, scratch, sums, lanes=most_lanes(x, backend))
    grad_bias, totals = sums
    if totals is None:  # without rows, Triton has no totals
        totals = zeros_like(weights, exact)
    found = zip(_flat(totals), _flat(_first_of_each(given)), strict=True)
    of_parameters = [g.to(p.dtype) for g, p in found if g is not None and p is not None]
    return [grad_x, *([] if grad_bias is None else [grad_bias]), *of_parameters]


def fake_gradients(call: Arguments) -> list[Tensor]:
    """Return uninitialised results of :func:`compute_gradients`."""
    x, bias, p = call["x"], call["bias"], GatedAttentionParams.of(call["parameters"])
    found = [torch.empty_like(x)]
    if bias is not None and call["needs"][1]:
        found.append(bias.new_empty(bias.shape, dtype=accumulation_dtype(x)))
    merged = (3 + (p.gate_weight is not None)) * len(p.query_weight), x.shape[-1]
    firsts = [first for first in _flat(_first_of_each(p)) if first is not None]
    return found + [first.new_empty(merged if first is p.query_weight else first.shape) for first in firsts]


def arrange_gradients(found: list[Tensor], call: Arguments) -> list[Tensor | None]:
    """Return the gradients of ``x``, bias and parameters; views of the operator's results."""
    rest = iter(found)
    grad_x, grad_bias = next(rest), next(rest) if call["needs"][1] else None
    return [grad_x, grad_bias, *gradients_of_parameters(rest, call["parameters"])]


def gradients_of_parameters(found: Iterable[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Arrange the operator's results after those of ``x`` and bias as gradients of the parameters; views."""
    p, rest = GatedAttentionParams.of(parameters), iter(found)
    norm, merged = (next(rest), next(rest)), next(rest)
    gate_bias = None if p.gate_bias is None else next(rest)
    return gradients_of(Weights(norm, merged, gate_bias, next(rest), next(rest))).present()


def _flat(weights: Weights) -> tuple[Tensor | None, ...]:
    return (*weights.norm, weights.merged, weights.bias, weights.output, weights.output_bias)


def _first_of_each(parameters: GatedAttentionParams) -> Weights:
    """Return the parameters as :class:`Weights`, with the first parameter in the place of merged ones."""
    p = parameters
    return Weights((p.norm_weight, p.norm_bias), p.query_weight, p.gate_bias, p.output_weight, p.output_bias)


def backward_cost(call: Arguments) -> OperatorCost:
    """Return the cost of a backward pass."""
    projections, attention, output = flops_of(call)
    flops = 3 * projections + 3.5 * attention + 2 * output
    traffic = 25 * size_in_bytes(call["x"])
    whole = OperatorCost(flops, traffic, launches=14, exponentials=scores_of(call))
    return without_beginning(call, whole)
