"""The 3D matrix product: every rank of a cube computes one block product, of blocks that are spread over its lines.

With p³ ranks, rank (x, y, z) computes the product of slab x of the batch and block (y, z) of the weight. The input is
gathered along z, the weight along x. The output is summed along y, and each rank keeps a part of it. Between layers
every tensor is cut into p³ parts. Only these are saved for the backward pass, which gathers again.

Sources: Agarwal et al. 1995; for networks Bian, Xu, Wang and You, "Maximizing parallelism in distributed training for
huge neural networks", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed
from fastfold.parallel.comm.differentiable import first_order
from fastfold.parallel.comm.groups import Group


class CubeLines(NamedTuple):
    """The lines of the cube that contain a rank.

    Input and weight are gathered along theirs. Along that of the output, which splits the input's features, products
    are summed.
    """

    input: Group
    weight: Group
    output: Group


def _gather(x: Tensor, group: Group, sizes: Sequence[int]) -> AsyncResult[Tensor]:
    return completed(x) if group.size == 1 else async_ops.start_gather(x, 0, group, sizes)


def _reduce_scatter(x: Tensor, group: Group, sizes: Sequence[int]) -> AsyncResult[Tensor]:
    return completed(x) if group.size == 1 else async_ops.start_reduce_scatter(x, 0, group, sizes)


class CubeLinear(Function):
    """``x @ weight.T`` on a cube; see :func:`cube_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Sequence[int], cuts: Sequence[int], lines: CubeLines
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.cuts, ctx.lines = rows, cuts, lines
        inputs, weights = _gather(x, lines.input, rows), _gather(weight, lines.weight, cuts)
        return _reduce_scatter(inputs.wait() @ weights.wait().T, lines.output, rows).wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        lines = ctx.lines
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        gradients = _gather(gradient, lines.output, ctx.rows)
        weights = _gather(weight, lines.weight, ctx.cuts) if wants_x else None
        inputs = _gather(x, lines.input, ctx.rows) if wants_weight else None
        whole = gradients.wait()
        x_terms = weight_terms = None
        if weights is not None:
            x_terms = _reduce_scatter(whole @ weights.wait(), lines.input, ctx.rows)
        if inputs is not None:
            left = inputs.wait()
            product = whole.reshape(-1, whole.shape[-1]).T @ left.reshape(-1, left.shape[-1])
            weight_terms = _reduce_scatter(product, lines.weight, ctx.cuts)
        return (
            None if x_terms is None else x_terms.wait(),
            None if weight_terms is None else weight_terms.wait(),
            *[None] * 3,
        )


def cube_linear(
    x: Tensor, weight: Tensor, rows: Sequence[int], cuts: Sequence[int], lines: CubeLines
) -> Tensor:
    """Compute ``x @ weight.T`` on a cube of ranks.

    Args:
        x: ``[rows[r], ..., in]`` with r this rank's number in ``lines.input``: its part of the slab's batch.
        weight: ``[cuts[r], in]`` with r its number in ``lines.weight``: its part of the block's outputs.
        rows: Lengths of the slab's batch, before (over ``lines.input``) and after (over ``lines.output``).
        cuts: Lengths of the parts of the weight's block.
        lines: The lines of the cube that contain the rank.

    Returns:
        ``[rows[r], ..., sum(cuts)]`` with r this rank's number in ``lines.output``.
    """
    result: Tensor = CubeLinear.apply(x, weight, rows, cuts, lines)
    return result
