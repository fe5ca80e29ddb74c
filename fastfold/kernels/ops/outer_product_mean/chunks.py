"""Outer product mean by matrix products of PyTorch, in chunks of rows that stay in a GPU's second-level cache.

Channels of the right side precede its columns in memory. The products of a chunk of rows are then one matrix
``[(i c), (e j)]``, and those of a row ``[(c e), j]``, which the weights multiply without another order.

:mod:`.chunk_choice` decides where Triton's kernels leave their work to these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import Tensor

from fastfold.kernels.common.layout import padded_width, part
from fastfold.kernels.common.scratch import accumulation_dtype
from fastfold.kernels.common.shared_masks import once
from fastfold.kernels.ops.outer_product_mean.chunk_choice import (
    GROUP,
    OuterProductSizes,
    chunk_sizes,
    joins_sides,
    parts_of_sum,
)
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams, batch_indices, counts_of
from fastfold.kernels.ops.outer_product_mean.triton_fwd import RightSide, masked
from fastfold.kernels.ops.residual_update.operands import UpdateOperands
from fastfold.kernels.ops.residual_update.triton_fwd import write_update


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
    sizes = chunk_sizes(rows, width, c, left.element_size())
    products = left.new_empty(sizes.rows * c, c * width)
    updates = left.new_empty(sizes.group, width, len(bias))
    for start in range(0, rows, sizes.group):
        group = slice(start, start + sizes.group)
        b_out = out[group]
        b_updates = updates[: len(b_out)]
        chunks = left[:, group].flatten(1).split(sizes.rows * c, 1)
        for b_left, b_update in zip(chunks, b_updates.split(sizes.rows), strict=True):
            b_products = _products(b_left, right, products)
            torch.bmm(b_products.mT, weight.expand(len(b_update), -1, -1), out=b_update)
        b_residual = None if residual is None else residual[group]
        norm = factors[group].expand_as(b_out)
        write_update(b_out, UpdateOperands(b_updates[:, :columns], b_residual, bias, None, norm))


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
        rows, columns, c_z = b_grad.shape
        joined = {"left", "right"} <= set(needed) and joins_sides(
            OuterProductSizes(len(b_left), rows, columns, c, c_z)
        )
        if has_parameters or "left" in needed:
            own = masked(b_left, masks[0])
            _walk_rows(
                b_grad,
                factors,
                masked_by_channels(b_right, masks[1]),
                _SideGradient(part(grad_left, i), of_left, masks[0]) if "left" in needed else None,
                _OtherGradient(part(grad_right, i), masks[1], own) if joined else None,
                _ParameterGradients(totals, own) if has_parameters else None,
            )
            del own  # before the buffers of columns exist
        if "right" in needed and not joined:
            _walk_rows(
                b_grad.transpose(0, 1),
                factors.transpose(0, 1),
                masked_by_channels(b_left, masks[0]),
                _SideGradient(part(grad_right, i), of_right, masks[1]),
            )
    return [grad_left, grad_right, *totals]


class _ParameterGradients:
    """Sums of the gradients of weight ``[c_z, (c e)]`` and bias, for a left side ``[S, I, c]`` times its mask."""

    def __init__(self, totals: list[Tensor], left: Tensor) -> None:
        self._of_weight, self._of_bias = totals
        self._left = left
        self._sums = self._of_weight.new_empty(GROUP, *self._of_weight.shape)

    def add_chunk(self, index: int, rows: slice, grad: Tensor, other: Tensor, products: Tensor) -> None:
        """Compute products of ``rows`` and their sum with ``grad``: chunk ``index`` of a group."""
        of_pairs = _products(self._left[:, rows].flatten(1), other, products)
        torch.sum(torch.bmm(grad.mT, of_pairs.mT), 0, dtype=self._sums.dtype, out=self._sums[index])

    def add_group(self, chunks: int, grad: Tensor) -> None:
        """Add the sums of the group's chunks to the totals, with gradients ``grad`` of all its rows."""
        self._of_weight += self._sums[:chunks].sum(0)
        self._of_bias += grad.sum((0, 1), dtype=self._of_bias.dtype)


class _SideGradient:
    """Gradient ``out [S, I, c]`` of a side with its mask ``[S, I]``; ``weight`` is ``[(c e), c_z]``."""

    def __init__(self, out: Tensor, weight: Tensor, mask: Tensor) -> None:
        self._out, self._weight, self._mask = out, weight, mask
        sequences, rows, c = out.shape
        self._side = out.new_empty(sequences, rows * c)  # rows and channels of ``out`` may be apart

    def write_chunk(self, rows: slice, grad: Tensor, other: Tensor, products: Tensor) -> Tensor:
        """Fill ``rows``; return gradients of their products ``[(i c), (e j)]``, in the buffer ``products``."""
        sequences, width, c = other.shape
        side = self._side[:, rows.start * c : rows.stop * c]
        gradients = products[: side.shape[1]]
        torch.bmm(self._weight.expand(len(grad), -1, -1), grad.mT, out=gradients.view(-1, c * c, width))
        flat = other.mT.flatten(1)  # [S, (e j)]
        parts = parts_of_sum(len(gradients), sequences, c)
        if parts == 1:
            torch.mm(flat, gradients.t(), out=side)
        else:
            # The sum over (e j) is long, and the side is small: without parts few processors would work.
            b_other, b_gradients = (x.unflatten(1, (parts, -1)).transpose(0, 1) for x in (flat, gradients))
            torch.sum(torch.bmm(b_other, b_gradients.mT), 0, out=side)
        return gradients

    def finish(self) -> None:
        """Write the gradient times its mask to ``out``."""
        side = self._side.view(self._out.shape)
        torch.mul(side, self._mask[..., None].to(side.dtype), out=self._out)


class _OtherGradient:
    """Gradient ``out [S, J, c]`` of the other side with its mask, for a left side ``[S, I, c]`` times its mask."""

    def __init__(self, out: Tensor, mask: Tensor, left: Tensor) -> None:
        self._out, self._mask, self._left = out, mask, left
        sequences, columns, c = out.shape
        size = sequences, c * padded_width(columns)
        self._total = out.new_zeros(size, dtype=accumulation_dtype(out))
        self._sum = out.new_empty(size)  # of a group, because a pass over the total takes longer

    def add_chunk(self, index: int, rows: slice, gradients: Tensor) -> None:
        """Add products of ``rows`` and ``gradients [(i c), (e j)]``: chunk ``index`` of a group."""
        left = self._left[:, rows].flatten(1)
        if index == 0:
            torch.mm(left, gradients, out=self._sum)
        else:
            self._sum.addmm_(left, gradients)

    def add_group(self) -> None:
        """Add the sum of a group to the total."""
        self._total += self._sum

    def finish(self) -> None:
        """Write the gradient times its mask to ``out``."""
        sequences, columns, c = self._out.shape
        total = self._total.view(sequences, c, -1)[..., :columns].mT
        torch.mul(total, self._mask[..., None].to(total.dtype), out=self._out)


def _walk_rows(
    grad: Tensor,
    factors: Tensor,
    other: Tensor,
    side: _SideGradient | None,
    shared: _OtherGradient | None = None,
    parameters: _ParameterGradients | None = None,
) -> None:
    """Compute gradients of both sides and of the parameters, in chunks of rows.

    ``grad [I, J, c_z]`` is that of the result, without its factors ``[I, J, 1]``. The other side ``[S, J', e]`` is in
    the layout of :func:`zeros_by_channels`. Its gradient is ``shared``, which needs the rows' ``side`` too.
    """
    (rows, columns, c_z), (width, c) = grad.shape, other.shape[1:]
    sizes = chunk_sizes(rows, width, c, other.element_size())
    scaled = other.new_empty(sizes.group, width, c_z)
    scaled[:, columns:] = 0
    products = other.new_empty(sizes.rows * c, c * width)
    for start in range(0, rows, sizes.group):
        group = slice(start, min(rows, start + sizes.group))
        b_scaled = scaled[: group.stop - group.start]
        torch.mul(grad[group], factors[group], out=b_scaled[:, :columns])
        chunks = b_scaled.split(sizes.rows)
        for index, chunk in enumerate(chunks):
            first = start + index * sizes.rows
            own = slice(first, first + len(chunk))
            if parameters is not None:
                parameters.add_chunk(index, own, chunk, other, products)
            if side is not None:
                gradients = side.write_chunk(own, chunk, other, products)
                if shared is not None:
                    shared.add_chunk(index, own, gradients)
        if parameters is not None:
            parameters.add_group(len(chunks), b_scaled)
        if shared is not None:
            shared.add_group()
    for gradient in (side, shared):
        if gradient is not None:
            gradient.finish()
