"""Forward and backward pass of gated attention, block of rows by block of rows.

This module decides which tensors exist at a time; a backend, ``eager`` or ``triton_launch``, computes a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fastfold.kernels.common.cost import Arguments
from fastfold.kernels.common.layout import batch_elements, part
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    finish,
)
from fastfold.kernels.common.shared_masks import once
from fastfold.kernels.cpu.block_threads import MAX_THREADS, for_blocks, sum_blocks
from fastfold.kernels.cpu.linear import product_dtype, requested_products
from fastfold.kernels.ops.gated_attention import eager
from fastfold.kernels.ops.gated_attention.eager import (
    GatedAttentionParams,
    Kept,
    RowBlock,
    Weights,
    arrange,
    centered_on,
    gradients_of,
    zeros_like,
)

LONG_ROW = 4096  #: Maximum row length at which each thread works on its own blocks, in positions

_LANE = 4 * 12
"""Bytes per channel and position of a block: projections, their copies, and results, in float32."""

Index = tuple[int | slice, ...]


class _Backend(Protocol):
    """Module with the passes of blocks of rows; :mod:`~.eager` describes arguments and results."""

    def prepare(
        self, bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]: ...
    def row_step(self, x: Tensor) -> int: ...
    def forward_step(self, weights: Weights, heads: int) -> eager.AttentionForward: ...
    def backward_dtype(self, x: Tensor) -> torch.dtype: ...
    def empty_normalized(self, x: Tensor) -> list[Tensor]: ...
    def gradient_step(
        self, weights: Weights, heads: int, needs_parameters: bool
    ) -> eager.AttentionGradients: ...


def blocks_of(backend: str) -> _Backend:
    """Return the module with the blocks of a backend."""
    if backend == "triton":
        from fastfold.kernels.ops.gated_attention import triton_launch

        return triton_launch
    return eager


def row_blocks(x: Tensor, step: Callable[[Tensor], int]) -> Iterator[tuple[Index, Index]]:
    """Yield indices of the batch elements of ``x [*, R, N, c]``, each with those of its blocks of rows."""
    rows = x.shape[-3]
    for i in batch_elements(x):
        size = step(part(x, i))
        for r in range(0, rows, size):
            yield i, i if size >= rows else (*i, slice(r, r + size))


def forward(
    out: Tensor,
    operands: RowBlock,
    parameters: GatedAttentionParams,
    *,
    heads: int,
    backend: str,
    scratch: Scratch | None = None,
    projections: Sequence[Tensor] = (),
    kept: Kept | None = None,
    at_once: bool = False,
) -> Tensor:
    """Fill ``out``, without autocast; projections, scores and output exist for one block of rows at a time.

    Arguments are those of :func:`fastfold.kernels.gated_attention`; ``projections`` are those of the first block, or
    empty. PyTorch fills ``kept`` for :func:`compute_gradients`.
    """
    blocks: _Backend = eager if backend == "torch" else blocks_of(backend)
    x, bias, mask, residual, dropout = operands
    is_reduced = requested_products() is not None
    dtype = product_dtype(x) if is_reduced else x.dtype
    scratch = Scratch(x.device, dtype) if scratch is None else scratch.of(x, dtype)
    if mask is not None:
        like = dtype if bias is None else bias.dtype
        lay_out = partial(blocks.prepare, None, mask, like)
        _, mask = once(lay_out, mask, size=mask.numel(), key=(blocks, like))
    if bias is not None:
        bias, _ = blocks.prepare(bias, None, dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(parameters, x.dtype, x.shape[:-1].numel())
    if is_reduced:
        weights = centered_on(x, weights)
    step = blocks.forward_step(weights, heads)
    rows_of_block = len if at_once and backend == "triton" else blocks.row_step
    if x.dim() == 3 and x.numel() > 0 and x.shape[0] <= rows_of_block(x):  # a single block
        step(
            out,
            RowBlock(x, bias, mask, residual, dropout),
            scratch,
            projections[0] if projections else None,
            kept,
        )
        return out

    def block(scratch: Scratch, i: Index, rows: Index, projections: Sequence[Tensor]) -> None:
        own = RowBlock(part(x, rows), part(bias, i), *(part(t, rows) for t in (mask, residual, dropout)))
        of_block = None if kept is None else kept.part(rows)
        step(part(out, rows), own, scratch, projections[0] if projections else None, of_block)

    blocks_and_projections = _with_first(row_blocks(x, rows_of_block), projections)
    for_blocks(block, blocks_and_projections, scratch, threads=_most_threads(x, backend))
    return out


def lanes_bytes(residues: int, channels: int) -> int:
    """Return the bytes of a CPU's threads that compute blocks at the same time, except one."""
    block = _LANE * channels * max(eager.POSITIONS, min(residues, LONG_ROW)) + 4 * BLOCK_ELEMENTS
    return (min(MAX_THREADS, torch.get_num_threads()) - 1) * block


def _with_first(
    indices: Iterator[tuple[Index, Index]], projections: Sequence[Tensor]
) -> Iterator[tuple[Any, ...]]:
    """Add ``projections`` to the indices of the first block, and nothing to the others'."""
    firsts = itertools.chain([projections], itertools.repeat(()))
    return ((*index, own) for index, own in zip(indices, firsts, strict=False))


def _most_threads(x: Tensor, backend: str) -> int:
    """Return the maximum number of blocks at a time."""
    # A block has at least one row, so long rows enlarge its buffers; all cores then share one block.
    return MAX_THREADS if backend == "torch" and x.shape[-2] <= LONG_ROW else 1


def compute_gradients(
    grad: Tensor,
    x: Tensor,
    out: Sequence[Tensor],
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

    Everything is recomputed from the inputs of :func:`fastfold.kernels.gated_attention`, but for ``out``: the memory of
    :class:`~.eager.Kept`, in a list of one tensor; the result of :func:`~.op.gated_attention_begin` for the backward
    pass; or nothing. With ``add_x``, ``x`` is also the residual. Gradients of parameters are left out if
    ``needs`` asks for none of them. The bias's is in the dtype of accumulation.
    """
    params, blocks, exact = GatedAttentionParams.of(parameters), blocks_of(backend), accumulation_dtype(x)
    kept = Kept.of(out[0], x, params, heads) if len(out) == 1 else None
    needs_parameters = any(needs[2:])
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = arrange(params, blocks.backward_dtype(x))._replace(positions=x.shape[:-1].numel())
    step = blocks.gradient_step(weights, heads, needs_parameters)
    # Triton's first block makes the totals.
    begins_with_totals = needs_parameters and backend != "triton"
    sums: list[Any] = [None, zeros_like(weights, exact) if begins_with_totals else None]
    if bias is not None and needs[1]:
        sums[0] = torch.zeros(bias.shape, dtype=exact, device=bias.device)
    grad_x = torch.empty_like(x)

    def block(
        scratch: Scratch, sums: list[Any], i: Index, rows: Index, projections: Sequence[Tensor]
    ) -> None:
        own = RowBlock(part(x, rows), part(bias, i), part(mask, rows), dropout=part(dropout, rows))
        b_grad, grad_bias = part(grad, rows), part(sums[0], i)
        of_block = None if kept is None else kept.part(rows)
        block_grad, sums[1] = step(b_grad, own, grad_bias, sums[1], scratch, projections, of_block)
        finish(part(grad_x, rows), block_grad, b_grad if add_x else None, None)

    blocks_and_projections = _with_first(row_blocks(x, blocks.row_step), out if kept is None else ())
    scratch = Scratch().of(x, blocks.backward_dtype(x))
    sum_blocks(block, blocks_and_projections, scratch, sums, threads=_most_threads(x, backend))
    grad_bias, totals = sums
    gradients = [grad_x, *([] if grad_bias is None else [grad_bias])]
    if not needs_parameters:
        return gradients
    if totals is None:  # without rows, Triton has no totals
        totals = zeros_like(weights, exact)
    pairs = zip(_flat(totals), _flat(_first_of_each(params)), strict=True)
    return gradients + [g.to(p.dtype) for g, p in pairs if g is not None and p is not None]


def fake_gradients(call: Arguments) -> list[Tensor]:
    """Return uninitialised results of :func:`compute_gradients`."""
    x, bias, p = call["x"], call["bias"], GatedAttentionParams.of(call["parameters"])
    gradients = [torch.empty_like(x)]
    if bias is not None and call["needs"][1]:
        gradients.append(bias.new_empty(bias.shape, dtype=accumulation_dtype(x)))
    if not any(call["needs"][2:]):
        return gradients
    merged = (3 + (p.gate_weight is not None)) * len(p.query_weight), x.shape[-1]
    firsts = [first for first in _flat(_first_of_each(p)) if first is not None]
    return gradients + [
        first.new_empty(merged if first is p.query_weight else first.shape) for first in firsts
    ]


def arrange_gradients(results: list[Tensor], call: Arguments) -> list[Tensor | None]:
    """Return the gradients of ``x``, bias and parameters; views of the operator's results."""
    rest = iter(results)
    grad_x, grad_bias = next(rest), next(rest) if call["needs"][1] else None
    return [grad_x, grad_bias, *gradients_of_parameters(rest, call["parameters"])]


def gradients_of_parameters(
    results: Iterable[Tensor], parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Arrange the operator's ``results`` after those of ``x`` and bias as gradients of the parameters; views.

    They are None if there are no such results.
    """
    p, rest = GatedAttentionParams.of(parameters), iter(results)
    norm_weight = next(rest, None)
    if norm_weight is None:
        return [None] * len(parameters)
    norm, merged = (norm_weight, next(rest)), next(rest)
    gate_bias = None if p.gate_bias is None else next(rest)
    return gradients_of(Weights(norm, merged, gate_bias, next(rest), next(rest))).present()


def _flat(weights: Weights) -> tuple[Tensor | None, ...]:
    return (*weights.norm, weights.merged, weights.bias, weights.output, weights.output_bias)


def _first_of_each(parameters: GatedAttentionParams) -> Weights:
    """Return the parameters as :class:`Weights`, with the first parameter in the place of merged ones."""
    p = parameters
    return Weights((p.norm_weight, p.norm_bias), p.query_weight, p.gate_bias, p.output_weight, p.output_bias)
