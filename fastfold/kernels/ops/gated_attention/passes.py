"""Forward pass of gated attention, block of rows by block of rows.

This module decides which tensors exist at a time; a backend, ``eager`` or ``triton_launch``, computes a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements, part
from fastfold.kernels.common.scratch import BLOCK_ELEMENTS, Scratch, without_autocast
from fastfold.kernels.cpu.block_threads import MAX_LANES, for_blocks
from fastfold.kernels.ops.gated_attention import eager
from fastfold.kernels.ops.gated_attention.eager import (
    GatedAttentionParams,
    RowBlock,
    Weights,
    arrange,
    centred_on,
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
    def Forward(self, weights: Weights, heads: int) -> eager.Forward: ...
    def backward_dtype(self, x: Tensor) -> torch.dtype: ...
    def normalised_shapes(self, x: Tensor) -> list[tuple[int, ...]]: ...
    def Backward(self, weights: Weights, heads: int) -> eager.Backward: ...


def blocks_of(backend: str) -> _Backend:
    """Return the module with the blocks of a backend."""
    if backend == "triton":
        from fastfold.kernels.ops.gated_attention import triton_launch

        return triton_launch
    return eager


def row_blocks(x: Tensor, step: Callable[[Tensor], int]) -> Iterator[tuple[Index, Index]]:
    """Yield indices of the batch elements of ``x [*, R, N, c]``, each with those of its blocks of rows."""
    for i in batch_elements(x):
        rows, size = x.shape[-3], step(part(x, i))
        for r in range(0, rows, size):
            yield i, i if size >= rows else (*i, slice(r, r + size))


@without_autocast
def forward(
    out: Tensor,
    operands: RowBlock,
    parameters: GatedAttentionParams,
    *,
    heads: int,
    backend: str,
    scratch: Scratch,
    begun: Sequence[Tensor] = (),
) -> Tensor:
    """Fill ``out``; projections, scores and output exist for one block of rows at a time.

    Arguments are those of :func:`fastfold.kernels.gated_attention`; ``begun`` may have the first block's projections.
    """
    blocks = blocks_of(backend)
    x, bias, mask, residual, dropout = operands
    bias, mask = blocks.prepare(bias, mask, x.dtype)
    dropout = None if dropout is None else dropout.expand_as(x)
    weights = centred_on(x, arrange(parameters, x.dtype))._replace(positions=x.shape[:-1].numel())
    step = blocks.Forward(weights, heads)

    def block(scratch: Scratch, i: Index, rows: Index, begun: Sequence[Tensor]) -> None:
        own = RowBlock(part(x, rows), part(bias, i), *(part(t, rows) for t in (mask, residual, dropout)))
        step(part(out, rows), own, scratch, *begun)

    blocks_and_begun = with_first(row_blocks(x, blocks.row_step), begun)
    for_blocks(block, blocks_and_begun, scratch.of(x), lanes=most_lanes(x, backend))
    return out


def lanes_bytes(residues: int, channels: int) -> int:
    """Return the bytes of a CPU's threads that compute blocks at the same time, except one."""
    block = _LANE * channels * max(eager.POSITIONS, min(residues, LONG_ROW)) + 4 * BLOCK_ELEMENTS
    return (min(MAX_LANES, torch.get_num_threads()) - 1) * block


def with_first(indices: Iterator[tuple[Index, Index]], begun: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Add ``begun`` to the indices of the first block, and nothing to the others'."""
    given = itertools.chain([begun], itertools.repeat(()))
    return ((*index, own) for index, own in zip(indices, given, strict=False))


def most_lanes(x: Tensor, backend: str) -> int:
    """Return the maximum number of blocks at a time.

    A block has at least one row, so long rows enlarge its buffers; all cores then share one block.
    """
    return MAX_LANES if backend == "torch" and x.shape[-2] <= LONG_ROW else 1
