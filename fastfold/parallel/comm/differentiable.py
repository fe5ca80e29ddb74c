"""A running collective as a pair of nodes in the autograd graph.

The communication runs between the call of :func:`differentiable` and ``wait()`` of its result, while other work is
done. The backward pass mirrors it: the gradient's communication starts at ``wait`` and is waited for at the call. So
it overlaps with the backward pass of the work in between. This is the duality of FastFold's asynchronous operations,
with the state in the result instead of a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastfold.errors import ConfigError
from fastfold.parallel.comm.async_ops import AsyncResult

Start = Callable[[Tensor], AsyncResult[Tensor]]
StartMany = Callable[[Sequence[Tensor]], Sequence[AsyncResult[Tensor]]]
StartGradients = Callable[[Sequence[Tensor | None]], Sequence[AsyncResult[Tensor]]]


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass refuse ``create_graph=True``, instead of failing in the second one.

    It decorates the static method of a ``torch.autograd.Function``.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True (a gradient penalty or second derivative) needs second derivatives of messages "
                "between ranks, which this plan lacks; use dp with zero=0, 1 or 2, or tp in 1d"
            )
        return once(ctx, *gradients)

    return checked


@dataclass
class _Shared:
    """State shared by the two ends of a message."""

    forward: StartMany  #: Starts the message
    #: Starts the message of the gradients; a gradient is None if its input needs none
    backward: StartGradients
    needed: Sequence[bool] = ()  #: True for each input that needs a gradient
    pending: Sequence[AsyncResult[Tensor]] = ()  #: The running message
    #: Work of the backward pass before it waits for the gradients
    meanwhile: Callable[[], None] | None = None

    def take(self) -> list[Tensor]:
        found, self.pending = [each.wait() for each in self.pending], ()
        return found


class _Launch(Function):
    """Start the message in the forward pass; wait for the gradients' in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, *tensors: Tensor) -> Tensor:
        ctx.shared, shared.needed = shared, ctx.needs_input_grad[1:]
        # Detached: a result may share memory with its input, and must not be the input itself.
        shared.pending = shared.forward([x.detach() for x in tensors])
        # Links the two ends in the graph. It has no element, so no kernel fills it.
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    @first_order
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.shared.meanwhile is not None:
            ctx.shared.meanwhile()
        found = iter(ctx.shared.take())
        return None, *(next(found) if needed else None for needed in ctx.shared.needed)


class _Complete(Function):
    """Wait for the message in the forward pass; start the gradients' in the backward pass."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, shared: _Shared) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return tuple(shared.take())

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.shared.needed
        ctx.shared.pending = ctx.shared.backward(
            [g if wanted else None for g, wanted in zip(gradients, needed, strict=True)]
        )
        return torch.empty(0, device=gradients[0].device), None


def differentiable(
    tensors: Sequence[Tensor],
    forward: StartMany,
    backward: StartGradients,
    meanwhile: Callable[[], None] | None = None,
) -> AsyncResult[tuple[Tensor, ...]]:
    """Start one message of several tensors, whose results are differentiable.

    ``backward`` starts the message of the results' gradients, and returns None for inputs that need none. ``meanwhile``
    is called while the backward pass waits for them.
    """
    shared = _Shared(forward, backward, meanwhile=meanwhile)
    token = _Launch.apply(shared, *tensors)
    return AsyncResult(lambda: _Complete.apply(token, shared))


def differentiable_one(x: Tensor, forward: Start, backward: Start) -> AsyncResult[Tensor]:
    """Start a collective of one tensor, whose result is differentiable."""
    joint = differentiable(
        [x],
        lambda tensors: [forward(tensors[0])],
        lambda gradients: [backward(g) for g in gradients if g is not None],
    )
    return AsyncResult(lambda: joint.wait()[0])
