"""Differentiable moves of a tensor between layouts of boxes on the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, Box, completed
from fastfold.parallel.comm.differentiable import differentiable_one
from fastfold.parallel.comm.groups import Group


def redistribute_async(
    x: Tensor, dims: Sequence[int], source: Sequence[Box], target: Sequence[Box], group: Group
) -> AsyncResult[Tensor]:
    """Start :func:`redistribute`."""
    axes = [dim % x.dim() for dim in dims]
    held = [part.stop - part.start for part in source[group.rank]]
    if len(source) != group.size or len(target) != group.size or held != [x.shape[dim] for dim in axes]:
        raise ValueError(
            f"expected box {source[group.rank]} of {group} in dimensions {axes}, found a tensor of shape "
            f"{tuple(x.shape)}"
        )
    if list(source) == list(target):
        return differentiable_one(x, completed, completed)
    return differentiable_one(
        x,
        lambda t: async_ops.start_redistribute(t, axes, source, target, group),
        lambda gradient: async_ops.start_redistribute(gradient, axes, target, source, group),
    )


def redistribute(
    x: Tensor, dims: Sequence[int], source: Sequence[Box], target: Sequence[Box], group: Group
) -> Tensor:
    """Move each rank's box to another layout of boxes; the gradient is moved back.

    Args:
        x: This rank's box.
        dims: The dimensions that are cut.
        source: For each rank its part of each of these dimensions. The parts cover each element once.
        target: For each rank the part of the result; the parts cover each element once.
        group: The ranks.

    Returns:
        This rank's box of the target.
    """
    return redistribute_async(x, dims, source, target, group).wait()
