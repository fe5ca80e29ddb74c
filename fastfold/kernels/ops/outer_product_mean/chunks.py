"""Outer product mean by matrix products of PyTorch, in chunks of rows that stay in a GPU's second-level cache.

Channels of the right side precede its columns in memory. The products of a chunk of rows are then one matrix
``[(i c), (e j)]``, and those of a row ``[(c e), j]``, which the weights multiply without another order.

:mod:`.chunk_choice` decides where Triton's kernels leave their work to these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from itertools import repeat

import torch
from torch import Tensor

from fastfold.kernels.common.layout import padded_width, part
from fastfold.kernels.common.scratch import accumulation_dtype
from fastfold.kernels.common.shared_masks import once
from fastfold.kernels.ops.outer_product_mean.chunk_choice import chunk_rows, parts_of_sum
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams, batch_indices, counts_of
from fastfold.kernels.ops.outer_product_mean.triton_fwd import RightSide, masked


def masked_by_channels(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x [*, S, J, c]`` times its ``mask [*, S, J]`` in the layout of :func:`zeros_by_channels`."""
    out = zeros_by_channels(x, x.shape)
    torch.mul(x, mask.to(x.dtype).unsqueeze(-1), out=out[..., : x.shape[-2], :])
    return out


def zeros_by_channels(like: Tensor, shape: torch.Size) -> Tensor:
    """Return zeros ``[*, S, J', c]`` for a side ``[*, S, J, c]``; in memory the channels precede the columns.

    There are as many columns J' as cuBLAS multiplies fast.
    """
    *axes, columns, channels = shape
    width = padded_width(columns)
    new = like.new_empty if width == columns else like.new_zeros
    return new((*axes, channels, width)).mT


def forward(
    shared: RightSide, eps: float, out: Tensor, left: Tensor, left_mask: Tensor, residual: Tensor | None
) -> None:
    """Fill ``out``, which may be ``residual``, as :func:`.triton_fwd.forward` does.

    ``shared.right`` is in the layout of :func:`zeros_by_channels`.
    """
    if out.numel() == 0:
        return
    weight = shared.weight.to(left.dtype).t()  # [(c e), c_z]
    left, bias = masked(left, left_mask), shared.bias.to(left.dtype)
    for i in batch_indices(left):
        masks = part(left_mask, i), part(shared.right_mask, i)
        size = out.shape[-3] * out.shape[-2]
        factors = once(functools.partial(_factors, *masks, eps), *masks, size=size, key=("factors", eps))
        b_residual = None if residual is None else part(residual, i)
        sides = part(left, i), part(shared.right, i)
        _fill(part(out, i), sides, (weight, bias), factors, b_residual)


def _factors(left_mask: Tensor, right_mask: Tensor, eps: float) -> Tensor:
    """Return one over the number of sequences of pairs of columns plus ``eps``: ``[I, J, 1]`` in float32."""
    return counts_of(left_mask, right_mask).add_(eps).reciprocal_()[..., None]


def _fill(
    out: Tensor,
    sides: tuple[Tensor, Tensor],
    parameters: tuple[Tensor, Tensor],
    factors: Tensor,
    residual: Tensor | None,
) -> None:
    (left, right), (weight, bias) = sides, parameters
    (_, rows, c), width, columns = left.shape, right.shape[1], out.shape[1]
    step = min(rows, chunk_rows(width, c, left.element_size()))
    products = left.new_empty(step * c, c * width)
    updates = left.new_empty(step, width, len(bias))
    chunks = zip(
        left.flatten(1).split(step * c, 1),
        out.split(step),
        factors.split(step),
        repeat(None) if residual is None else residual.split(step),
        strict=False,  # ``repeat`` does not end
    )
    for b_left, b_out, b_factors, b_residual in chunks:
        b_products = _products(b_left, right, products)
        b_update = updates[: len(b_out)]
        torch.bmm(b_products.mT, weight.expand(len(b_out), -1, -1), out=b_update)
        b_update = b_update[:, :columns].add_(bias)
        if b_residual is None:
            torch.mul(b_update, b_factors, out=b_out)
        else:
            torch.addcmul(b_residual, b_update, b_factors, out=b_out)


def _products(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute sums over the sequences ``[I, (c e), J']`` of ``left [S, (I c)]`` and ``right [S, J', e]``."""
    width, c = right.shape[1:]
    products = out[: left.shape[1]]
    torch.mm(left.t(), right.mT.flatten(1), out=products)
    return products.view(-1, c * c, width)


def backward(grad: Tensor, inputs: OuterProductParams, eps: float, needed: Collection[str]) -> list[Tensor]:
    """Return gradients of ``left``, ``right``, ``weight`` and ``bias``, as :func:`.triton_bwd.backward` does."""
    left, right, left_mask, right_mask, weight, bias = inputs
    c = left.shape[-1]
    weights = weight.to(left.dtype).unflatten(-1, (c, c))  # [c_z, c, e]
    of_left, of_right = (w.flatten(1).t() for w in (weights, weights.mT))  # [(c e), c_z], [(e c), c_z]
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    totals = [torch.zeros_like(p, dtype=accumulation_dtype(left)) for p in (weight, bias)]
    if grad.numel() == 0:
        return [grad_left.zero_(), grad_right.zero_(), *totals]
    has_parameters = bool({"weight", "bias"} & set(needed))
    for i in batch_indices(left):
        masks, b_grad = (part(left_mask, i), part(right_mask, i)), part(grad, i)
        b_left, b_right, factors = part(left, i), part(right, i), _factors(*masks, eps)
        if has_parameters or "left" in needed:
            rows = _RowGradients(b_grad, factors, masked_by_channels(b_right, masks[1]))
            if has_parameters:
                rows.add_parameters(totals, masked(b_left, masks[0]))
            if "left" in needed:
                rows.write_side(part(grad_left, i), of_left, masks[0])
        if "right" in needed:
            other = masked_by_channels(b_left, masks[0])
            columns = _RowGradients(b_grad.transpose(0, 1), factors.transpose(0, 1), other)
            columns.write_side(part(grad_right, i), of_right, masks[1])
    return [grad_left, grad_right, *totals]


class _RowGradients:
    """Gradients ``[I, J, c_z]`` of the result in chunks of rows, times factors ``[I, J, 1]``, with the other side.

    ``other [S, J', e]`` is in the layout of :func:`zeros_by_channels`. Both methods overwrite the same buffers.
    """

    def __init__(self, grad: Tensor, factors: Tensor, other: Tensor) -> None:
        (self.rows, self.columns, c_z), (width, c) = grad.shape, other.shape[1:]
        self.step = min(self.rows, chunk_rows(width, c, other.element_size()))
        self._grads, self._factors, self._other = grad.split(self.step), factors.split(self.step), other
        self._scaled = other.new_empty(self.step, width, c_z)
        self._scaled[:, self.columns :] = 0
        self._products = other.new_empty(self.step * c, c * width)

    def _chunks(self) -> Iterator[Tensor]:
        """Yield gradients times their factors, ``[I, J', c_z]``."""
        for grad, factors in zip(self._grads, self._factors, strict=True):
            scaled = self._scaled[: len(grad)]
            torch.mul(grad, factors, out=scaled[:, : self.columns])
            yield scaled

    def add_parameters(self, totals: list[Tensor], left: Tensor) -> None:
        """Add gradients of weight ``[c_z, (c e)]`` and bias to ``totals``, from ``left [S, I, c]`` times its mask."""
        of_weight, of_bias = totals
        sides = left.flatten(1).split(self.step * left.shape[-1], 1)
        for grad, b_left in zip(self._chunks(), sides, strict=True):
            products = _products(b_left, self._other, self._products)
            partial = torch.bmm(grad.mT, products.mT)  # [i, c_z, (c e)]
            of_weight += partial.sum(0, dtype=of_weight.dtype)
            of_bias += grad.sum((0, 1), dtype=of_bias.dtype)

    def write_side(self, out: Tensor, weight: Tensor, mask: Tensor) -> None:
        """Fill the gradient ``out [S, I, c]`` of the side of the rows; ``weight`` is ``[(c e), c_z]``."""
        sequences, width, c = self._other.shape
        sides = out.new_empty(sequences, self.rows * c)
        other = self._other.mT.flatten(1)  # [S, (e j)]
        for grad, side in zip(self._chunks(), sides.split(self.step * c, 1), strict=True):
            products = self._products[: side.shape[1]]
            torch.bmm(weight.expand(len(grad), -1, -1), grad.mT, out=products.view(-1, c * c, width))
            parts = parts_of_sum(len(products), sequences, c)
            if parts == 1:
                torch.mm(other, products.t(), out=side)
                continue
            # The sum over (e j) is long, and the side is small: without parts few processors would work.
            b_other, b_products = (x.unflatten(1, (parts, -1)).transpose(0, 1) for x in (other, products))
            torch.sum(torch.bmm(b_other, b_products.mT), 0, out=side)
        torch.mul(sides.view(sequences, -1, c), mask[..., None].to(out.dtype), out=out)
