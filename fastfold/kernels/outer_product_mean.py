"""Outer product mean: what two columns of an alignment have in common becomes their pair's update."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from fastfold.kernels.blocks import (
    BLOCK_ELEMENTS,
    Scratch,
    exact_dtype,
    finish,
    refuse_gradients,
    without_autocast,
)


def outer_product_mean_definition(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-3,
) -> Tensor:
    """Specification of :func:`outer_product_mean`: holds all ``[*, I, J, c, c]`` products."""
    dtype, exact = left.dtype, torch.promote_types(left.dtype, torch.float32)
    left_mask, right_mask = left_mask.to(exact), right_mask.to(exact)
    left = left.to(exact) * left_mask[..., None]
    right = right.to(exact) * right_mask[..., None]
    products = torch.einsum("...sic,...sje->...ijce", left, right).flatten(-2)
    counts = torch.einsum("...si,...sj->...ij", left_mask, right_mask)
    out = linear(products, weight.to(exact), bias.to(exact)) / (eps + counts[..., None])
    return out.to(dtype)


@without_autocast
def _forward(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    residual: Tensor | None,
    scratch: Scratch,
) -> None:
    c = left.shape[-1]
    weight_t = weight.to(left.dtype).unflatten(-1, (c, c)).permute(2, 1, 0).flatten(0, 1)  # [(e c), c_z]
    bias = bias.to(left.dtype)
    scratch = scratch.of(left)
    for i in itertools.product(*map(range, left.shape[:-3])):
        columns_l, columns_r = _columns(left[i], left_mask[i]), _columns(right[i], right_mask[i])
        factor = _norm(left_mask[i], right_mask[i], eps).reciprocal_()[..., None]
        for tile in _tiles(factor.shape, c):
            b_products = _products(columns_l[tile[0]], columns_r[tile[1]], scratch)
            b_update = torch.addmm(
                bias, b_products, weight_t, out=scratch("update", len(b_products), len(bias))
            )
            b_update = b_update.view(*factor[tile].shape[:2], -1)
            finish(out[i][tile], b_update, None if residual is None else residual[i][tile], factor[tile])


class _OuterProductMean(torch.autograd.Function):
    """Keeps its inputs; the products exist for one tile of pairs at a time, in both directions.

    With the right side as ``[J e, S]``, the product with one left column ``[S, c]`` is ``[J, (e c)]`` in memory:
    rows that multiply the output weight as they are, if its columns are put in the order (e c) once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        left_mask: Tensor,
        right_mask: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(left, right, left_mask, right_mask, weight, bias)
        ctx.eps = eps
        out = left.new_empty(*left.shape[:-3], left.shape[-2], right.shape[-2], len(bias))
        _forward(out, left, right, left_mask, right_mask, weight, bias, eps, residual, Scratch())
        return out

    @staticmethod
    @without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, left_mask, right_mask, weight, bias = ctx.saved_tensors
        need_left, need_right, _, _, need_weight, need_bias, _, _ = ctx.needs_input_grad
        exact = exact_dtype(left)
        c = left.shape[-1]
        weight = weight.to(exact).unflatten(-1, (c, c)).transpose(1, 2).flatten(1)  # [c_z, (e c)]
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(bias, dtype=exact)
        scratch = Scratch().of(left, exact)
        for i in itertools.product(*map(range, left.shape[:-3])):
            columns_l = _columns(left[i].to(exact), left_mask[i])  # [I, c, S]
            columns_r = _columns(right[i].to(exact), right_mask[i])  # [J, e, S]
            grad_l, grad_r = torch.zeros_like(columns_l), torch.zeros_like(columns_r)
            factor = _norm(left_mask[i], right_mask[i], ctx.eps).reciprocal_()[..., None]
            for tile in _tiles(factor.shape, c):
                b_left, b_right = columns_l[tile[0]], columns_r[tile[1]]
                b_grad = scratch("grad", len(b_left), len(b_right), len(weight))
                b_grad = torch.mul(grad[i][tile], factor[tile], out=b_grad).flatten(0, 1)  # [(i j), c_z]
                if need_bias:
                    grad_bias += b_grad.sum(0)
                if need_weight:
                    grad_weight.addmm_(b_grad.t(), _products(b_left, b_right, scratch))
                if not (need_left or need_right):
                    continue
                b_products = torch.mm(b_grad, weight, out=scratch("products", len(b_grad), c * c))
                b_products = b_products.view(len(b_left), len(b_right), c, c)  # [i, j, e, c]
                if need_left:
                    b_grad_l, b_r = grad_l[tile[0]], b_right.flatten(0, 1).expand(len(b_left), -1, -1)
                    b_grad_l.baddbmm_(b_products.flatten(1, 2).mT, b_r)
                if need_right:
                    b_turned = scratch.copy("turned", b_products.permute(1, 2, 0, 3)).flatten(2).flatten(0, 1)
                    grad_r[tile[1]].flatten(0, 1).addmm_(b_turned, b_left.flatten(0, 1))
            torch.mul(grad_l.permute(2, 0, 1), left_mask[i][..., None], out=grad_left[i])
            torch.mul(grad_r.permute(2, 0, 1), right_mask[i][..., None], out=grad_right[i])
        grad_weight = grad_weight.unflatten(-1, (c, c)).transpose(1, 2).flatten(1)
        grads = (grad_left, grad_right, None, None, grad_weight, grad_bias, None, grad)
        return tuple(x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=True))


def _columns(x: Tensor, mask: Tensor) -> Tensor:
    """``[S, I, c]`` times its mask, as ``[I, c, S]`` in memory."""
    return torch.mul(x.permute(1, 2, 0), mask.to(x.dtype).t()[:, None], out=x.new_empty(*x.shape[1:], len(x)))


def _norm(left_mask: Tensor, right_mask: Tensor, eps: float) -> Tensor:
    """``[I, J]``: the number of sequences that both columns have, plus ``eps``."""
    exact = exact_dtype(left_mask)
    return (left_mask.to(exact).t() @ right_mask.to(exact)).add_(eps)


def _tiles(shape: torch.Size, c: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of the pair grid whose products fit into the cache: whole rows, or a part of one."""
    rows, cols = shape[:2]
    pairs = max(1, BLOCK_ELEMENTS // (c * c))
    row_step, col_step = max(1, pairs // cols), min(cols, pairs)
    for i, j in itertools.product(range(0, rows, row_step), range(0, cols, col_step)):
        yield slice(i, i + row_step), slice(j, j + col_step)


def _products(left: Tensor, right: Tensor, scratch: Scratch) -> Tensor:
    """``[(i j), (e c)]`` of ``left [i, c, S]`` and ``right [j, e, S]``."""
    (i, c, _), (j, _, _) = left.shape, right.shape
    out = scratch("products", i, j * c, c)
    torch.bmm(right.flatten(0, 1).expand(i, -1, -1), left.mT, out=out)
    return out.view(i * j, c * c)


def outer_product_mean(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-3,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Mean over the sequences of the outer products of two columns, projected to pair channels.

    ``(Σ_s left[s, i, c] · right[s, j, e] · weight[:, c·C + e] + bias) / (eps + Σ_s left_mask · right_mask)``:
    steps 2 to 4 of algorithm 10 of the AlphaFold supplement. As in its program the bias is divided too.

    Args:
        left: Projected alignment ``[*, S, I, c]``.
        right: Projected alignment ``[*, S, J, c]``.
        left_mask: ``[*, S, I]``, multiplies ``left``. A constant: it receives no gradient.
        right_mask: ``[*, S, J]``, multiplies ``right``. A constant likewise.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        eps: Added to the number of sequences that both columns have.
        residual: ``[*, I, J, c_z]`` to add to the update.
        out: Where the result goes, without recording gradients; may be ``residual``.
        scratch: With ``out``: buffers to use, and to leave behind for the next operator.

    Returns:
        The update ``[*, I, J, c_z]``, plus the residual, in the dtype of ``left``.

    Raises:
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    arguments = (left, right, left_mask, right_mask, weight, bias, eps, residual)
    if out is None:
        return _OuterProductMean.apply(*arguments)
    refuse_gradients(left, right, weight, bias, residual)
    _forward(out, *arguments, scratch or Scratch())
    return out
