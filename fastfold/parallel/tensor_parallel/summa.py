"""SUMMA: a matrix product on a square grid of ranks; each rank holds one block of every matrix.

Step k of the product broadcasts column k of the left blocks along the rows and row k of the right ones along the
columns, and adds the product of the received blocks. Meanwhile the broadcasts of step k + 1 run. A rank holds at most
two received blocks of each matrix: the one in use and the next one. It never holds a gathered row or column.

Sources: van de Geijn and Watts 1997; for networks Xu, Li, Gong and You, "An efficient 2D method for training
super-large deep learning models", 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastfold.parallel.comm.differentiable import first_order
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comm.pipelined import absent, broadcasts, sums


def _broadcast_each(own: Tensor, shapes: Sequence[tuple[int, ...]], group: Group) -> Iterator[Tensor]:
    """Yield the blocks of all ranks, one after another."""
    return broadcasts(lambda k: own if group.rank == k else absent(own, *shapes[k]), range(group.size), group)


def _reduce_each(terms: Iterable[Tensor], group: Group) -> Tensor:
    """Sum all ranks' term k on rank k."""
    return sums(terms, range(group.size), group)[0]


class SummaLinear(Function):
    """``x @ weight.T`` on a grid; see :func:`summa_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sizes: Sequence[int], row: Group, column: Group
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Blocks of x along this rank's row, and of the weight along its column.
        ctx.lefts = [(*x.shape[:-1], size) for size in sizes]
        ctx.rights = [(weight.shape[0], size) for size in sizes]
        ctx.row, ctx.column = row, column
        # Half precision would round after every step.
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.new_zeros((*x.shape[:-1], weight.shape[0]), dtype=wide)
        lefts, rights = _broadcast_each(x, ctx.lefts, row), _broadcast_each(weight, ctx.rights, column)
        for left, right in zip(lefts, rights, strict=True):
            y += left @ right.T
        return y.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        row, column = ctx.row, ctx.column
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            # Features k of the input belong to column k.
            rights = _broadcast_each(weight, ctx.rights, column)
            x_gradient = _reduce_each((gradient @ right for right in rights), row)
        if ctx.needs_input_grad[1]:
            flat = gradient.reshape(-1, gradient.shape[-1])
            lefts = _broadcast_each(x, ctx.lefts, row)
            weight_gradient = _reduce_each(
                (flat.T @ left.reshape(flat.shape[0], -1) for left in lefts), column
            )
        return x_gradient, weight_gradient, None, None, None


def summa_linear(x: Tensor, weight: Tensor, sizes: Sequence[int], row: Group, column: Group) -> Tensor:
    """Compute ``x @ weight.T`` of matrices that are cut into blocks over a square grid.

    Args:
        x: ``[batch_i, ..., in_j]``: this rank's row of the batch, its column's part of the features.
        weight: ``[out_j, in_i]``: its column's part of the output features, its row's part of the input features.
        sizes: Lengths of the parts of the input features.
        row: The ranks of this rank's row of the grid, one for each column.
        column: The ranks of its column.

    Returns:
        ``[batch_i, ..., out_j]``
    """
    result: Tensor = SummaLinear.apply(x, weight, sizes, row, column)
    return result
