"""PyTorch path of the outer product mean: the products exist for one tile of pairs at a time.

For few sequences, the output weight multiplies one side first:
``Σ_ce weight[z, ce] · Σ_s left[s, i, c] · right[s, j, e]`` is ``Σ_se right[s, j, e] · premultiplied[i, s, e, z]`` with
``premultiplied[i, s, e, z] = Σ_c left[s, i, c] · weight[z, ce]``. This takes S c c_z multiply-adds per pair instead of
S c² + c² c_z, and S c² c_z per row. With 32 and 128 channels that is less below about 40 sequences, and for a
single one a thirtieth. Gradients of both sides are sums of the same form. If no gradient of the weight is needed,
which needs the products themselves, they are computed in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    finish,
    share_of,
)
from fastfold.kernels.cpu.block_threads import for_blocks, sum_blocks, threads_of
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    add_product,
    add_products,
    by_onednn,
    gradient_dtype,
    matrix_product,
    product_dtype,
    reduced,
)
from fastfold.kernels.cpu.products import onednn_linear

DEEP = 512
"""Sequences from which multiplying several columns at once is faster, although the products must then be reordered.
Times are in ``benchmarks/results/choices.md``."""

BLOCK = BLOCK_ELEMENTS // 4
"""Elements of premultiplied weights, and of an update, of a block: both stay in a core's cache."""

REDUCED_TIME = {"int8": 0.8, "bf16": 0.25}
"""Time of ``ProductRows`` with its weight in 8 bits, or all in bfloat16, relative to float32.

The value of bfloat16 is half of the measured one (``benchmarks/results/choices.md``), because processors with matrix
units for bfloat16 may be twice as fast."""

ONEDNN_TIME = 0.55
"""Time of ``ProductRows`` by oneDNN, relative to MKL, which multiplies premultiplied weights."""

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

    def __call__(
        self,
        out: Tensor,
        left: Tensor,
        left_mask: Tensor,
        residual: Tensor | None,
        index: tuple[int, ...] = (),
    ) -> None:
        """Fill ``out [*, I, J, c_z]``, which may be ``residual``; ``index`` is that of an alignment in a batch."""
        if left.dim() > 3:
            for i in batch_indices(left):
                self(out[i], left[i], left_mask[i], None if residual is None else residual[i], i)
            return
        columns_r, right_mask = (
            (self._columns[index], self._mask[index]) if index else (self._columns, self._mask)
        )
        sequences, rows, c = left.shape
        columns_l = _columns(left, left_mask, columns_r.new_empty(rows, c, sequences))
        factor = (
            counts_of(left_mask, right_mask, right_mask.dtype)
            .add_(self._eps)
            .mul_(self._share)
            .reciprocal_()[..., None]
        )
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
        for_blocks(block, blocks, self._scratch, threads=threads_of(factor.numel(), columns_l.dtype))


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
        factor = counts_of(left_mask[i], right_mask[i], exact).add_(eps).reciprocal_()[..., None]
        tiles = _tiles(factor.shape, c, left.shape[-3], dtype)
        blocks = ((columns_l[t[0]], columns_r[t[1]], t, grad[i][t], factor[t]) for t in tiles)
        totals = [grad_weight, grad_bias, grad_l, grad_r]
        sum_blocks(block, blocks, scratch, totals, threads=threads_of(factor.numel(), dtype))
        torch.mul(grad_l.permute(2, 0, 1), left_mask[i][..., None], out=grad_left[i])
        torch.mul(grad_r.permute(2, 0, 1), right_mask[i][..., None], out=grad_right[i])
    grad_weight = grad_weight.unflatten(-1, (c, c)).transpose(1, 2).flatten(1)
    return [grad_left, grad_right, grad_weight, grad_bias]


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


def counts_of(left_mask: Tensor, right_mask: Tensor, exact: torch.dtype = torch.float32) -> Tensor:
    """Count the sequences that both columns have: ``[I, J]`` in the dtype ``exact``."""
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


def premultiplying_pays(like: Tensor, right_mask: Tensor, weight: Tensor) -> bool:
    """Return True if :class:`PremultipliedRows` is faster than ``ProductRows``, and holds no more than a block.

    The number of multiply-adds predicts the ratio of times well (``benchmarks/results/choices.md``). Premultiplied
    weights are in the dtype of the data, so they must beat reduced products by their gain. They are never in float16:
    sums of products are scaled to fit into it, but premultiplied weights are not.

    The mask is ``[*, S, J]`` and the weight ``[c_z, c * c]``; ``like`` has the dtype and device of both sides.
    """
    sequences, columns = right_mask.shape[-2:]
    c_z, c = weight.shape[0], math.isqrt(weight.shape[-1])
    products = reduced(like)
    if products is not None and product_dtype(like) == torch.bfloat16:
        products = "bf16"  # also requested as 8 bits, if the processor has units for bfloat16
    if like.dtype == torch.float16 or sequences * c * c_z > BLOCK:
        return False
    # Multiply-adds of a row.
    premultiplied = sequences * c * c_z * (columns + c)
    by_products = columns * c * c * (sequences + c_z)
    if products is not None:
        return premultiplied < REDUCED_TIME[products] * by_products
    return premultiplied < (ONEDNN_TIME if by_onednn(like) else 1.0) * by_products


def premultiplying_pays_backward(inputs: OuterProductParams, needed: Collection[str]) -> bool:
    """Return True if :func:`side_gradients` computes the gradients of inputs by name, and in less time than products.

    Both sides' gradients count, because a side alone is rare.
    """
    like, (sequences, columns) = inputs.right, inputs.right_mask.shape[-2:]
    c_z, c = len(inputs.weight), math.isqrt(inputs.weight.shape[-1])
    is_exact = gradient_dtype(like) == accumulation_dtype(like)
    if not set(needed) <= {"left", "right"} or not is_exact or sequences * c * c_z > BLOCK:
        return False
    # Multiply-adds of a row.
    premultiplied = 2 * sequences * c * c_z * (columns + c)
    by_products = columns * c * c * (2 * sequences + c_z)
    return premultiplied < (ONEDNN_TIME if by_onednn(like) else 1.0) * by_products


def side_gradients(grad: Tensor, inputs: OuterProductParams, eps: float) -> list[Tensor]:
    """Compute the gradients of ``left`` and ``right`` from that of the result ``[*, I, J, c_z]``.

    The right side multiplies the weight first. Its gradient is that of the premultiplied weights times the weight.

    Returns:
        Gradients ``[*, S, I, c]`` and ``[*, S, J, c]`` in the dtype of the inputs.
    """
    left, right, left_mask, right_mask, weight, _ = inputs
    exact, sequences, c, c_z = accumulation_dtype(left), left.shape[-3], left.shape[-1], len(weight)
    by_channel = weight.to(exact).unflatten(-1, (c, c))  # [c_z, c, e]
    of_right = by_channel.permute(2, 0, 1).flatten(1)  # [e, (c_z c)]
    to_right = by_channel.flatten(0, 1)  # [(c_z c), e]
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    scratch = Scratch().of(left, exact)
    col_step = max(1, BLOCK // (c_z * max(1, sequences * c)))
    row_step = max(1, BLOCK // (c_z * col_step))
    for i in batch_indices(left):
        columns_l, columns_r = (
            _columns_by_sequence(x[i].to(exact), mask[i], x.new_empty(x.shape[-2], sequences, c, dtype=exact))
            for x, mask in ((left, left_mask), (right, right_mask))
        )
        flat_l, grad_l = columns_l.flatten(1), torch.zeros_like(columns_l).flatten(1)
        grad_r = torch.empty_like(columns_r)
        factor = counts_of(left_mask[i], right_mask[i], exact).add_(eps).reciprocal_()[..., None]
        for j in range(0, len(columns_r), col_step):
            b_right = columns_r[j : j + col_step]
            premultiplied = (b_right.flatten(0, 1) @ of_right).view(len(b_right), sequences, c_z, c)
            premultiplied = premultiplied.transpose(1, 2).reshape(-1, sequences * c)  # [(j c_z), (S c)]
            grad_premultiplied = torch.zeros_like(premultiplied)
            for r in range(0, len(columns_l), row_step):
                tile = slice(r, r + row_step), slice(j, j + col_step)
                b_left = flat_l[tile[0]]
                pairs = scratch("pairs", len(b_left), len(b_right), c_z)
                pairs = torch.mul(grad[i][tile], factor[tile], out=pairs).flatten(1)  # [i, (j c_z)]
                grad_l[tile[0]].addmm_(pairs, premultiplied)
                grad_premultiplied.addmm_(pairs.t(), b_left)
            by_sequence = grad_premultiplied.view(len(b_right), c_z, sequences, c).transpose(1, 2)
            torch.matmul(by_sequence.flatten(2), to_right, out=grad_r[j : j + col_step])
        for side, mask, total in ((grad_left, left_mask, grad_l), (grad_right, right_mask, grad_r)):
            total = total.view(-1, sequences, c).transpose(0, 1)
            torch.mul(total, mask[i].to(exact)[..., None], out=side[i])
    return [grad_left, grad_right]


class PremultipliedRows:
    """Writer of the result's rows, block by block; arguments as of :class:`ProductRows`."""

    # A row's premultiplied weights are a matrix ``[(s e), c_z]`` that the right side, ``[J, (s e)]``, is multiplied by.

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
        self._right = like.new_empty(*batch, columns, sequences, c)
        # PyTorch transposes matrices without gaps tile by tile.
        self._weight = weight.to(like.dtype).t().contiguous().view(c, -1)  # [c, (e c_z)]
        self._bias = bias.to(like.dtype)
        self._mask, self._eps = right_mask, eps
        self._scratch = Scratch(like.device, like.dtype)
        start = 0
        for x in right:
            rows = slice(start, start + x.shape[-3])
            if x.shape[:-1] == right_mask.shape:  # every view costs host time
                _columns_by_sequence(x, right_mask, self._right)
            else:
                _columns_by_sequence(x, right_mask[..., rows, :], self._right[..., rows, :])
            start = rows.stop

    def __call__(
        self,
        out: Tensor,
        left: Tensor,
        left_mask: Tensor,
        residual: Tensor | None,
        index: tuple[int, ...] = (),
    ) -> None:
        """Fill ``out [*, I, J, c_z]``, which may be ``residual``; ``index`` is that of an alignment in a batch."""
        if left.dim() > 3:
            for i in batch_indices(left):
                self(out[i], left[i], left_mask[i], None if residual is None else residual[i], i)
            return
        right, right_mask = (self._right[index], self._mask[index]) if index else (self._right, self._mask)
        scratch, (sequences, rows, c), c_z = self._scratch, left.shape, self._bias.shape[0]
        columns_l, columns_r = (
            _columns_by_sequence(left, left_mask, left.new_empty(rows, sequences, c)),
            right.flatten(1),
        )
        columns = columns_r.shape[0]  # [J, (s e)]
        col_step = max(1, min(columns, BLOCK // c_z))
        row_step = max(1, BLOCK // (c_z * max(1, sequences * c, col_step)))
        factor = counts_of(left_mask, right_mask, right_mask.dtype).add_(self._eps).reciprocal_()[..., None]
        is_whole = row_step >= rows and col_step >= columns
        for r in range(0, rows, row_step):
            b_left = columns_l if is_whole else columns_l[r : r + row_step]
            height = b_left.shape[0]
            b_weights = scratch("premultiplied", height * sequences, c * c_z)
            torch.mm(b_left.flatten(0, 1), self._weight, out=b_weights)
            b_weights = b_weights.view(height, sequences * c, c_z)
            for j in range(0, columns, col_step):
                tile = slice(r, r + row_step), slice(j, j + col_step)
                b_right = columns_r if is_whole else columns_r[tile[1]]
                b_update = scratch("update", height, b_right.shape[0], c_z)
                # One call for all rows: products of few sequences take less time than a call.
                each_right = b_right.expand(height, -1, -1)
                torch.baddbmm(self._bias, each_right, b_weights, out=b_update)
                if is_whole:
                    finish(out, b_update, residual, factor)
                else:
                    finish(out[tile], b_update, None if residual is None else residual[tile], factor[tile])


def _columns_by_sequence(x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """Fill ``out [*, I, S, c]`` with ``x [*, S, I, c]`` times its mask."""
    torch.mul(x, mask.to(x.dtype)[..., None], out=out.transpose(-3, -2))
    return out
