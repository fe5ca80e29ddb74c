"""The 3D matrix product: every rank of a cube computes one block product, of blocks that are spread over its lines.

With p³ ranks (x, y, z) the product of slab x of the batch and block (y, z) of the weight is computed on rank
(x, y, z): the input is gathered along z, the weight along x, and the output is summed along y, of which each
rank keeps a part. Between layers every tensor is cut into p³ parts, and only these are saved for the
backward pass, which gathers again. (Agarwal et al. 1995; for networks: Bian, Xu, Wang and You, "Maximizing
parallelism in distributed training for huge neural networks", 2021.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed
from fastfold.parallel.comm.groups import Group


def _gather(x: Tensor, group: Group, sizes: Sequence[int]) -> AsyncResult:
    return completed(x) if group.size == 1 else async_ops.start_gather(x, 0, group, sizes)


def _reduce_scatter(x: Tensor, group: Group, sizes: Sequence[int]) -> AsyncResult:
    return completed(x) if group.size == 1 else async_ops.start_reduce_scatter(x, 0, group, sizes)


class CubeLinear(Function):
    """``x @ weight.T`` on a cube; see :func:`cube_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rows: Sequence[int],
        cuts: Sequence[int],
        input_group: Group,
        weight_group: Group,
        output_group: Group,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.cuts = rows, cuts
        ctx.groups = input_group, weight_group, output_group
        inputs, weights = _gather(x, input_group, rows), _gather(weight, weight_group, cuts)
        return _reduce_scatter(inputs.wait() @ weights.wait().T, output_group, rows).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        input_group, weight_group, output_group = ctx.groups
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        gradients = _gather(gradient, output_group, ctx.rows)
        weights = _gather(weight, weight_group, ctx.cuts) if wants_x else None
        inputs = _gather(x, input_group, ctx.rows) if wants_weight else None
        whole = gradients.wait()
        x_terms = weight_terms = None
        if weights is not None:
            x_terms = _reduce_scatter(whole @ weights.wait(), input_group, ctx.rows)
        if inputs is not None:
            left = inputs.wait()
            product = whole.reshape(-1, whole.shape[-1]).T @ left.reshape(-1, left.shape[-1])
            weight_terms = _reduce_scatter(product, weight_group, ctx.cuts)
        return (
            None if x_terms is None else x_terms.wait(),
            None if weight_terms is None else weight_terms.wait(),
            *[None] * 5,
        )


def cube_linear(
    x: Tensor,
    weight: Tensor,
    rows: Sequence[int],
    cuts: Sequence[int],
    input_group: Group,
    weight_group: Group,
    output_group: Group,
) -> Tensor:
    """``x @ weight.T`` on a cube of ranks.

    Args:
        x: ``[rows[r], ..., in]`` with r this rank's number in ``input_group``: its part of the slab's batch.
        weight: ``[cuts[r], in]`` with r its number in ``weight_group``: its part of the block's outputs.
        rows: How the slab's batch is cut, before (over ``input_group``) and after (over ``output_group``).
        cuts: How the weight's block is cut.
        input_group: The line along which the input is gathered.
        weight_group: The line along which the weight is gathered.
        output_group: The line along which the products are summed: it splits the input's features.

    Returns:
        ``[rows[r], ..., sum(cuts)]`` with r this rank's number in ``output_group``.
    """
    result: Tensor = CubeLinear.apply(x, weight, rows, cuts, input_group, weight_group, output_group)
    return result
