"""PyTorch path of the outer product mean: the products exist for one tile of pairs at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    share_of,
)
from fastfold.kernels.cpu.block_threads import for_blocks, lanes_of, sum_blocks
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    add_product,
    add_products,
    by_onednn,
    gradient_dtype,
    matrix_product,
    product_dtype,
)
from fastfold.kernels.cpu.products import onednn_linear

DEEP = 512
"""Sequences from which multiplying several columns at once is faster, although the products must then be reordered.
Times are in ``benchmarks/results/choices.md``."""


Tile = tuple[slice, slice]
"""Left and right columns of a block of pairs."""


class OuterProductParams(NamedTuple):
    """Inputs of :func:`fastfold.kernels.outer_product_mean`, in the order of its arguments."""

    left: Tensor
    right: Tensor
    left_mask: Tensor
    right_mask: Tensor
    weight: Tensor
    bias: Tensor


class ProductRows:
    """Writer of the result's rows, block by block; the right side is reordered once.

    With the right side as ``[J e, S]``, the product with one left column ``[S, c]`` is ``[J, (e c)]`` in memory. These
    rows multiply the output weight directly, if its columns are put in the order (e c) once.

    ``right`` is in blocks of sequences ``[*, s, J, c]``; ``like`` has the dtype and device of both sides.
    """

    def __init__(
        self,
        like: Tensor,
        right: Iterable[Tensor],
        right_mask: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> None:
        (*batch, sequences, columns), c = right_mask.shape, math.isqrt(weight.shape[-1])
        dtype = product_dtype(like)
        self._columns = like.new_empty(*batch, columns, c, sequences, dtype=dtype)
        self._weight = weight.unflatten(-1, (c, c)).transpose(1, 2).flatten(1)  # [c_z, (e c)]
        self._share = share_of(sequences, like.dtype)
        self._bias = bias * self._share
        self._output = PreparedLinear(self._weight.to(like.dtype), self._bias.to(like.dtype))
        # Read before threads start, because for_blocks changes the setting.
        self._by_onednn = by_onednn(self._columns)
        self._mask, self._eps = right_mask, eps
        self._scratch = Scratch(like.device, like.dtype)
        for i, block, x in sequence_blocks(right):
            rows: tuple[int | slice, ...] = (*i, block)
            place: tuple[int | slice, ...] = (*i, slice(None), slice(None), block)
            _columns(x, right_mask[rows], self._columns[place])

    def __call__(self, out: Tensor, left: Tensor, left_mask: Tensor, residual: Tensor | None) -> None:
        """Fill ``out [*, I, J, c_z]``, which may be ``residual``."""
        if left.dim() == 3:
            self._fill(out, left, left_mask, residual, self._columns, self._mask)
            return
        fill_each(self._fill, out, left, left_mask, residual, self._columns, self._mask)

    def _fill(
        self,
        out: Tensor,
        left: Tensor,
        left_mask: Tensor,
        residual: Tensor | None,
        columns_r: Tensor,
        right_mask: Tensor,
    ) -> None:
        sequences, rows, c = left.shape
        columns_l = _columns(left, left_mask, columns_r.new_empty(rows, c, sequences))
        factor = counts_of(left_mask, right_mask).add_(self._eps).mul_(self._share).reciprocal_()[..., None]
        output = self._output
        scales: tuple[Tensor, ...] = (factor,)
        if columns_l.dtype == torch.bfloat16 and bool((factor == factor.flatten()[:1]).all()):
            # A factor that all pairs share is part of the weight.
            mean, scales = factor.flatten()[0], ()
            weight, bias = (self._weight * mean).to(columns_l.dtype), (self._bias * mean).to(out.dtype)
            output = PreparedLinear(weight, bias)
        residuals = () if residual is None else (residual,)

        def block(
            scratch: Scratch, tile: Tile, b_left: Tensor, b_right: Tensor, b_out: Tensor, *b_residual: Tensor
        ) -> None:
            scratch = scratch.of(b_left)
            b_products = _products(b_left, b_right, scratch, share=self._share, in_onednn=self._by_onednn)
            b_factor = scales[0][tile] if scales else None
            output.update(b_out, b_products, b_residual[0] if b_residual else None, b_factor, scratch=scratch)

        tiles = _tiles(factor.shape, c, sequences, columns_l.dtype)
        pairs = (out, *residuals)
        blocks = ((t, columns_l[t[0]], columns_r[t[1]], *(x[t] for x in pairs)) for t in tiles)
        for_blocks(block, blocks, self._scratch, lanes=lanes_of(factor.numel(), columns_l.dtype))


def backward(grad: Tensor, inputs: OuterProductParams, eps: float, needed: Collection[str]) -> list[Tensor]:
    """Compute gradients; products exist for one tile of pairs at a time."""
    left, right, left_mask, right_mask, weight, bias = inputs
    need_left, need_right = "left" in needed, "right" in needed
    exact, dtype = accumulation_dtype(left), gradient_dtype(left)
    c = left.shape[-1]
    weight = weight.to(dtype).unflatten(-1, (c, c)).transpose(1, 2).flatten(1)  # [c_z, (e c)]
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    grad_weight, grad_bias = torch.zeros_like(weight, dtype=exact), torch.zeros_like(bias, dtype=exact)

    def block(
        scratch: Scratch,
        totals: Sequence[Tensor],
        b_left: Tensor,
        b_right: Tensor,
        tile: Tile,
        *pairs: Tensor,
    ) -> None:
        grad_weight, grad_bias, grad_l, grad_r = totals
        b_grad = scratch("grad", len(b_left), len(b_right), len(weight))
        b_grad = torch.mul(*pairs, out=b_grad).flatten(0, 1)  # [(i j), c_z]
        if "bias" in needed:
            grad_bias += b_grad.sum(0)
        if "weight" in needed:
            add_product(grad_weight, b_grad.t(), _products(b_left, b_right, scratch), scratch, left)
        if not (need_left or need_right):
            return
        b_products = matrix_product(b_grad, weight, scratch("products", len(b_grad), c * c))
        b_products = b_products.view(len(b_left), len(b_right), c, c)  # [i, j, e, c]
        if need_left and dtype == exact:
            b_r = b_right.flatten(0, 1).expand(len(b_left), -1, -1)
            grad_l[tile[0]].baddbmm_(b_products.flatten(1, 2).mT, b_r)
        if not need_right and dtype == exact:
            return
        b_matrix = scratch.copy("transposed", b_products.permute(1, 2, 0, 3)).flatten(2).flatten(0, 1)
        if need_left and dtype != exact:
            # PyTorch would copy the expanded side for a batch of products in bfloat16.
            add_products(grad_l[tile[0]].flatten(0, 1), b_matrix.t(), b_right.flatten(0, 1), scratch)
        if need_right:
            add_products(grad_r[tile[1]].flatten(0, 1), b_matrix, b_left.flatten(0, 1), scratch)

    scratch = Scratch().of(left, dtype)
    for i in batch_indices(left):
        columns_l = _columns(left[i].to(dtype), left_mask[i])  # [I, c, S]
        columns_r = _columns(right[i].to(dtype), right_mask[i])  # [J, e, S]
        grad_l, grad_r = (torch.zeros_like(x, dtype=exact) for x in (columns_l, columns_r))
        factor = counts_of(left_mask[i], right_mask[i]).add_(eps).reciprocal_()[..., None]
        tiles = _tiles(factor.shape, c, left.shape[-3], dtype)
        blocks = ((columns_l[t[0]], columns_r[t[1]], t, grad[i][t], factor[t]) for t in tiles)
        totals = [grad_weight, grad_bias, grad_l, grad_r]
        sum_blocks(block, blocks, scratch, totals, lanes=lanes_of(factor.numel(), dtype))
        torch.mul(grad_l.permute(2, 0, 1), left_mask[i][..., None], out=grad_left[i])
        torch.mul(grad_r.permute(2, 0, 1), right_mask[i][..., None], out=grad_right[i])
    grad_weight = grad_weight.unflatten(-1, (c, c)).transpose(1, 2).flatten(1)
    return [grad_left, grad_right, grad_weight, grad_bias]


def fill_each(
    fill: Callable[..., None],
    out: Tensor,
    left: Tensor,
    left_mask: Tensor,
    residual: Tensor | None,
    right: Tensor,
    right_mask: Tensor,
) -> None:
    """Call ``fill`` with the further arguments of each alignment in a batch; all have its axes first."""
    for i in batch_indices(left):
        added = None if residual is None else residual[i]
        fill(out[i], left[i], left_mask[i], added, right[i], right_mask[i])


def batch_indices(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Return the indices of ``[S, I, c]`` in ``x [*, S, I, c]``."""
    return itertools.product(*map(range, x.shape[:-3]))


def sequence_blocks(side: Iterable[Tensor]) -> Iterator[tuple[tuple[int, ...], slice, Tensor]]:
    """Yield batch index, sequences and content ``[s, J, c]`` of every part of a side in blocks ``[*, s, J, c]``."""
    start = 0
    for content in side:
        block = slice(start, start + content.shape[-3])
        for i in batch_indices(content):
            yield i, block, content[i] if i else content
        start = block.stop


def _columns(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply ``[S, I, c]`` by its mask, as ``[I, c, S]`` in memory."""
    out = x.new_empty(*x.shape[1:], len(x)) if out is None else out
    if x.dtype == torch.bfloat16 and out.is_contiguous():
        # PyTorch transposes matrices without gaps tile by tile.
        out.flatten(0, 1).copy_(x.reshape(len(x), -1).t())
        return out if bool((mask == 1).all()) else out.mul_(mask.to(x.dtype).t()[:, None])
    return torch.mul(x.permute(1, 2, 0), mask.to(x.dtype).t()[:, None], out=out)


def counts_of(left_mask: Tensor, right_mask: Tensor) -> Tensor:
    """Count the sequences that both columns have: ``[I, J]``."""
    exact = accumulation_dtype(left_mask)
    left = left_mask.to(exact)
    return torch.mm(left.t(), left if right_mask is left_mask else right_mask.to(exact))


def _tiles(shape: torch.Size, c: int, sequences: int, dtype: torch.dtype = torch.float32) -> Iterator[Tile]:
    """Yield tiles of pairs whose products fit into the cache: squares for deep alignments, else rows."""
    rows, cols = shape[:2]
    if rows == 0 or cols == 0:
        return
    pairs = max(1, BLOCK_ELEMENTS * (2 if dtype == torch.bfloat16 else 1) // (c * c))
    row_step = min(rows, math.isqrt(pairs) if sequences >= DEEP else max(1, pairs // cols))
    col_step = min(cols, pairs // row_step)
    for i, j in itertools.product(range(0, rows, row_step), range(0, cols, col_step)):
        yield slice(i, i + row_step), slice(j, j + col_step)


def _products(
    left: Tensor, right: Tensor, scratch: Scratch, *, share: float = 1.0, in_onednn: bool = False
) -> Tensor:
    """Compute ``[(i j), (e c)]`` of ``left [i, c, S]`` and ``right [j, e, S]``, times ``share``.

    A shallow alignment takes one product per left column, whose result needs no reordering. (For a batch of them,
    PyTorch would copy the right side every time on a CPU in bfloat16.) A deep alignment takes one product for all
    columns: the sides are larger than the caches, and are read once for all. oneDNN also takes one product, because it
    allocates memory for the result, and so does bfloat16, whose products are fast enough to wait for each other.
    """
    (i, c, sequences), (j, _, _) = left.shape, right.shape
    out, left, right = scratch("products", i, j * c, c), left.flatten(0, 1), right.flatten(0, 1)
    if left.dtype == torch.bfloat16:
        joined = torch.mm(right, left.t(), out=scratch("joined", j * c, i * c))
    elif in_onednn:
        joined = onednn_linear(right, left)
    elif sequences < DEEP:
        for b_left, b_out in zip(left.split(c), out, strict=True):
            torch.addmm(b_out, right, b_left.t(), beta=0, alpha=share, out=b_out)
        return out.view(i * j, c * c)
    else:
        joined = scratch("joined", j * c, i * c)
        torch.addmm(joined, right, left.t(), beta=0, alpha=share, out=joined)
    out.copy_(joined.view(j * c, i, c).transpose(0, 1))
    return out.view(i * j, c * c)
