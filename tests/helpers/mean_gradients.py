"""Gradients of ranks that compute one loss together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group


def mean_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Replace each ``grad`` by its mean over the ranks; parameters without one are left out."""
    if group.size == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(async_ops.start_all_reduce(parameter.grad, group).wait() / group.size)
