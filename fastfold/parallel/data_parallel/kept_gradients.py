"""Records of reduced gradients, to detect changes by other code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fastfold.parallel.data_parallel.sharded_norm import local

Kept = dict[str, tuple[TensorWeakRef, int]]
"""A gradient and its version, by name."""

BEFORE_REDUCTION = (
    "optimizer.step() before the gradients were summed over the ranks: call reduce_gradients() after backward() "
    "and before step(); after parallel(...) run the last backward() outside of no_sync()"
)


def changed_message(name: str) -> str:
    """Return the message about a gradient that was changed by a function that sees only a part of it."""
    return (
        f"the gradient of {name} changed after reduce_gradients(), and this rank has only a part of it; clip with "
        "clip_grad_norm_() of the object that parallelize() returned, and scale the loss"
    )


@torch.no_grad()
def keep_gradients(parameters: Mapping[str, nn.Parameter]) -> Kept:
    """Record the present gradients of parameters."""
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {name: (TensorWeakRef(gradient), local(gradient)._version) for name, gradient in found.items()}


@torch.no_grad()
def is_kept(gradient: Tensor | None, kept: tuple[TensorWeakRef, int] | None) -> bool:
    """Return True if a gradient is the recorded one, unchanged."""
    if gradient is None or kept is None:
        return gradient is None and kept is None
    return gradient is kept[0]() and local(gradient)._version == kept[1]


@torch.no_grad()
def add_gradients(parameters: Mapping[str, nn.Parameter], earlier: Mapping[str, Tensor]) -> None:
    """Add gradients of earlier backward passes to those of parameters."""
    for name, gradient in earlier.items():
        own = parameters[name].grad
        parameters[name].grad = gradient if own is None else own + gradient
