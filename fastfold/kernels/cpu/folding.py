"""Outer product mean of few sequences in PyTorch: the output weight multiplies one side first.

``Σ_ce weight[z, ce] · Σ_s left[s, i, c] · right[s, j, e]`` is ``Σ_se right[s, j, e] · folded[i, s, e, z]`` with
``folded[i, s, e, z] = Σ_c left[s, i, c] · weight[z, ce]``. This takes S c c_z multiply-adds per pair instead of
S c² + c² c_z, and S c² c_z per row. With 32 and 128 channels that is less below about 40 sequences, and for a
single one a thirtieth. Gradients of both sides are sums of the same form. If no gradient of the weight is needed,
which needs the products themselves, they are computed in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    finish,
)
from fastfold.kernels.cpu.linear import by_onednn, gradient_dtype, product_dtype, reduced
from fastfold.kernels.ops.outer_product_mean.eager import (
    OuterProductParams,
    batch_indices,
    counts_of,
    fill_each,
)

BLOCK = BLOCK_ELEMENTS // 4
"""Elements of folded weights, and of an update, of a block: both stay in a core's cache."""

REDUCED_TIME = {"int8": 0.8, "bf16": 0.25}
"""Time of ``eager.ProductRows`` with its weight in 8 bits, or all in bfloat16, relative to float32.

The value of bfloat16 is half of the measured one (``benchmarks/results/choices.md``), because processors with matrix
units for bfloat16 may be twice as fast."""

ONEDNN_TIME = (
    0.55  #: Time of ``eager.ProductRows`` by oneDNN, relative to MKL, which folded weights are multiplied by
)


def folding_pays(like: Tensor, right_mask: Tensor, weight: Tensor) -> bool:
    """Return True if :class:`FoldedRows` is faster than ``eager.ProductRows``, and holds no more than a block.

    The number of multiply-adds predicts the ratio of times well (``benchmarks/results/choices.md``). Folding multiplies
    in the dtype of the data, so it must beat reduced products by their gain. It is never done in float16: sums of
    products are scaled to fit into it, but folded weights are not.

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
    folded = sequences * c * c_z * (columns + c)
    unfolded = columns * c * c * (sequences + c_z)
    if products is not None:
        return folded < REDUCED_TIME[products] * unfolded
    return folded < (ONEDNN_TIME if by_onednn(like) else 1.0) * unfolded


def folding_pays_backward(inputs: OuterProductParams, needed: Collection[str]) -> bool:
    """Return True if :func:`side_gradients` computes the gradients of inputs by name, and in less time than products.

    Both sides' gradients count, because a side alone is rare.
    """
    like, (sequences, columns) = inputs.right, inputs.right_mask.shape[-2:]
    c_z, c = len(inputs.weight), math.isqrt(inputs.weight.shape[-1])
    is_exact = gradient_dtype(like) == accumulation_dtype(like)
    if not set(needed) <= {"left", "right"} or not is_exact or sequences * c * c_z > BLOCK:
        return False
    # Multiply-adds of a row.
    folded = 2 * sequences * c * c_z * (columns + c)
    unfolded = columns * c * c * (2 * sequences + c_z)
    return folded < (ONEDNN_TIME if by_onednn(like) else 1.0) * unfolded


def side_gradients(grad: Tensor, inputs: OuterProductParams, eps: float) -> list[Tensor]:
    """Compute the gradients of ``left`` and ``right`` from that of the result ``[*, I, J, c_z]``.

    The right side multiplies the weight first. Its gradient is that of the folded weights times the weight.

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
            _columns(x[i].to(exact), mask[i], x.new_empty(x.shape[-2], sequences, c, dtype=exact))
            for x, mask in ((left, left_mask), (right, right_mask))
        )
        flat_l, grad_l = columns_l.flatten(1), torch.zeros_like(columns_l).flatten(1)
        grad_r = torch.empty_like(columns_r)
        factor = counts_of(left_mask[i], right_mask[i]).add_(eps).reciprocal_()[..., None]
        for j in range(0, len(columns_r), col_step):
            b_right = columns_r[j : j + col_step]
            folded = (b_right.flatten(0, 1) @ of_right).view(len(b_right), sequences, c_z, c)
            folded = folded.transpose(1, 2).reshape(-1, sequences * c)  # [(j c_z), (S c)]
            grad_folded = torch.zeros_like(folded)
            for r in range(0, len(columns_l), row_step):
                tile = slice(r, r + row_step), slice(j, j + col_step)
                b_left = flat_l[tile[0]]
                pairs = scratch("pairs", len(b_left), len(b_right), c_z)
                pairs = torch.mul(grad[i][tile], factor[tile], out=pairs).flatten(1)  # [i, (j c_z)]
                grad_l[tile[0]].addmm_(pairs, folded)
                grad_folded.addmm_(pairs.t(), b_left)
            by_sequence = grad_folded.view(len(b_right), c_z, sequences, c).transpose(1, 2)
            torch.matmul(by_sequence.flatten(2), to_right, out=grad_r[j : j + col_step])
        for side, mask, total in ((grad_left, left_mask, grad_l), (grad_right, right_mask, grad_r)):
            total = total.view(-1, sequences, c).transpose(0, 1)
            torch.mul(total, mask[i].to(exact)[..., None], out=side[i])
    return [grad_left, grad_right]


class FoldedRows:
    """Writer of the result's rows, block by block; arguments as of ``eager.Rows``."""

    # A row's folded weights are a matrix ``[(s e), c_z]`` that the right side, ``[J, (s e)]``, is multiplied by.

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
                _columns(x, right_mask, self._right)
            else:
                _columns(x, right_mask[..., rows, :], self._right[..., rows, :])
            start = rows.stop

    def __call__(self, out: Tensor, left: Tensor, left_mask: Tensor, residual: Tensor | None) -> None:
        """Fill ``out [*, I, J, c_z]``, which may be ``residual``."""
        if left.dim() == 3:
            self._fill(out, left, left_mask, residual, self._right, self._mask)
            return
        fill_each(self._fill, out, left, left_mask, residual, self._right, self._mask)

    def _fill(
        self,
        out: Tensor,
        left: Tensor,
        left_mask: Tensor,
        residual: Tensor | None,
        right: Tensor,
        right_mask: Tensor,
    ) -> None:
        scratch, (sequences, rows, c), c_z = self._scratch, left.shape, self._bias.shape[0]
        columns_l, columns_r = _columns(left, left_mask, left.new_empty(rows, sequences, c)), right.flatten(1)
        columns = columns_r.shape[0]  # [J, (s e)]
        col_step = max(1, min(columns, BLOCK // c_z))
        row_step = max(1, BLOCK // (c_z * max(1, sequences * c, col_step)))
        factor = counts_of(left_mask, right_mask).add_(self._eps).reciprocal_()[..., None]
        is_whole = row_step >= rows and col_step >= columns
        for r in range(0, rows, row_step):
            b_left = columns_l if is_whole else columns_l[r : r + row_step]
            height = b_left.shape[0]
            b_folded = scratch("folded", height * sequences, c * c_z)
            torch.mm(b_left.flatten(0, 1), self._weight, out=b_folded)
            b_folded = b_folded.view(height, sequences * c, c_z)
            for j in range(0, columns, col_step):
                tile = slice(r, r + row_step), slice(j, j + col_step)
                b_right = columns_r if is_whole else columns_r[tile[1]]
                b_update = scratch("update", height, b_right.shape[0], c_z)
                # One call for all rows: products of few sequences take less time than a call.
                each_right = b_right.expand(height, -1, -1)
                torch.baddbmm(self._bias, each_right, b_folded, out=b_update)
                if is_whole:
                    finish(out, b_update, residual, factor)
                else:
                    finish(out[tile], b_update, None if residual is None else residual[tile], factor[tile])


def _columns(x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """Fill ``out [*, I, S, c]`` with ``x [*, S, I, c]`` times its mask."""
    torch.mul(x, mask.to(x.dtype)[..., None], out=out.transpose(-3, -2))
    return out
