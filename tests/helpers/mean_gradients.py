"""Gradients of ranks that compute one loss together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group


def mean_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Replace each ``grad`` by its mean over the ranks, in one reduction; parameters without one are left out."""
    if group.size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = async_ops.start_all_reduce(torch.cat([x.flatten() for x in gradients]), group).wait()
    for gradient, mean in zip(
        gradients, (total / group.size).split([x.numel() for x in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))
