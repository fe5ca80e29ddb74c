"""A collective under way, as a pair of nodes in the autograd graph.

The communication runs between the call that makes a :class:`Handle` and :meth:`Handle.wait`, while something
else is computed. The backward pass mirrors it: the gradient's communication starts where ``wait`` stood and
is waited for where the call stood, so it overlaps with the backward pass of what was computed in between (the
duality of FastFold's asynchronous operations, with the state in the handle rather than in a module).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastfold.parallel.comm.async_ops import AsyncResult

Start = Callable[[Tensor], AsyncResult]


@dataclass
class _Exchange:
    """What the two ends of one collective share: how to start it either way, and what is under way."""

    forward: Start
    backward: Start
    pending: AsyncResult | None = None

    def take(self) -> Tensor:
        assert self.pending is not None
        result, self.pending = self.pending.wait(), None
        return result


class _Launch(Function):
    """Starts the collective forward; waits for the gradient's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: _Exchange) -> Tensor:
        ctx.shared = shared
        # Detached: the result may share memory with x, and must not be taken for x itself.
        shared.pending = shared.forward(x.detach())
        # Only links the two ends in the graph.
        return torch.zeros((), dtype=x.dtype, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.take(), None


class _Complete(Function):
    """Waits for the collective forward; starts the gradient's backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, shared: _Exchange) -> Tensor:
        ctx.shared = shared
        return shared.take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.shared.pending = ctx.shared.backward(gradient)
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device), None


class Handle:
    """A collective under way; :meth:`wait` gives its result, differentiable, as often as it is asked for."""

    def __init__(self, x: Tensor, forward: Start, backward: Start) -> None:
        self._shared = _Exchange(forward, backward)
        self._token = _Launch.apply(x, self._shared)
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result. On a GPU the current stream waits for it, not the host."""
        if self._result is None:
            self._result = _Complete.apply(self._token, self._shared)
        return self._result
