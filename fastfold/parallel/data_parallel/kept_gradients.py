"""Reduced gradients of an optimizer's parameters, recorded to detect changes by other code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fastfold.parallel.agreement import StepAgreement
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms, local

Kept = dict[str, tuple[TensorWeakRef, int]]  #: A gradient and its version, by name

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


class ReducedGradients:
    """Gradients of an optimizer's parameters after their sum over the ranks; base of all ZeRO stages.

    Norms are those of tensors laid out like :attr:`optimised`.
    """

    stage = 0

    def __init__(self, parameters: Mapping[str, nn.Parameter], norms: ShardNorms) -> None:
        self.agreement: StepAgreement | None = None
        self.parameters, self.names = dict(parameters), list(parameters)
        self._norms = norms
        self._finished: Kept | None = None
        self._aside: dict[str, Tensor] = {}

    @property
    def optimised(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank's optimizer updates, by name."""
        return self.parameters

    @property
    def norms(self) -> ShardNorms:
        """Norms of tensors laid out like :attr:`optimised`."""
        return self._norms

    def gradient_square(self) -> Tensor:
        """Return the squared norm of the whole model's reduced gradient (a collective)."""
        return self.norms.total({name: p.grad for name, p in self.optimised.items()})

    @property
    def is_reduced(self) -> bool:
        """True if the gradients are those of :meth:`accept_gradients`."""
        return self._finished is not None

    def accept_gradients(self) -> None:
        """Accept the present gradients of :attr:`optimised` as those of the step."""
        self._finished = keep_gradients(self.optimised)

    def forget_gradients(self) -> None:
        """Clear the gradients of the parameters and of this rank's shards of them."""
        self._clear()
        self._aside = {}

    def _clear(self) -> None:
        for parameter in (*self.parameters.values(), *self.optimised.values()):
            parameter.grad = None
        self._finished = None

    def set_aside(self) -> None:
        """Store reduced gradients before another backward pass; :meth:`add_set_aside` adds them."""
        if self._finished is None:
            return
        kept = {n: p.grad for n, p in self.optimised.items() if self.parameters[n].grad is not None}
        self._clear()
        self._aside = {name: gradient for name, gradient in kept.items() if gradient is not None}

    def add_set_aside(self) -> None:
        """Add the gradients of earlier backward passes to those of the last one."""
        if self._aside:
            add_gradients(self.optimised, self._aside)
            self._aside = {}
            self.accept_gradients()
