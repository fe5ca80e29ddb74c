"""Differentiable collectives over a group of ranks, with uneven shards and with overlap.

``<name>_async`` is the asynchronous form of a collective, which returns an
:class:`~fastfold.parallel.comm.async_ops.AsyncResult`. The communication runs between the call and its ``wait``, while
other work is done. The backward pass mirrors it: the gradient's communication starts at ``wait`` and is waited for at
the call, so it overlaps with the backward pass of the work in between. This is the duality of FastFold's asynchronous
operations, with the state in the result instead of a module.

The gradient is that of the sum of all ranks' losses, unless a function says otherwise.
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
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.comm.moves import Box, Move, Shards

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
class _SharedMessage:
    """State shared by the two ends of a message."""

    forward: StartMany  #: Starts the message
    #: Starts the message of the gradients; a gradient is None if its input needs none
    backward: StartGradients
    needed: Sequence[bool] = ()  #: True for each input that needs a gradient
    pending: Sequence[AsyncResult[Tensor]] = ()  #: The running message
    #: Work of the backward pass before it waits for the gradients
    meanwhile: Callable[[], None] | None = None

    def take(self) -> list[Tensor]:
        arrived, self.pending = [each.wait() for each in self.pending], ()
        return arrived


class _Launch(Function):
    """Start the message in the forward pass; wait for the gradients' in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shared: _SharedMessage, *tensors: Tensor) -> Tensor:
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
        arrived = iter(ctx.shared.take())
        return None, *(next(arrived) if needed else None for needed in ctx.shared.needed)


class _Complete(Function):
    """Wait for the message in the forward pass; start the gradients' in the backward pass."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, shared: _SharedMessage) -> tuple[Tensor, ...]:
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
    shared = _SharedMessage(forward, backward, meanwhile=meanwhile)
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


def _axis(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    return dim % x.dim()


def _shards(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """Return the lengths of all ranks' shards; x is this rank's shard."""
    lengths = [x.shape[dim]] * group.size if sizes is None else list(sizes)
    if len(lengths) != group.size or lengths[group.rank] != x.shape[dim]:
        raise ValueError(
            f"shards of lengths {lengths} over {group}: expected one for each of {group.size} ranks, and this rank's "
            f"tensor has {x.shape[dim]} in dimension {dim}"
        )
    return lengths


def _parts(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """Return the lengths of the ranks' shards of x."""
    lengths = shard_sizes(x.shape[dim], group.size) if sizes is None else list(sizes)
    if len(lengths) != group.size or sum(lengths) != x.shape[dim]:
        raise ValueError(
            f"shards of lengths {lengths} over {group}: expected {group.size} lengths with a sum of {x.shape[dim]}, "
            f"the length of dimension {dim}"
        )
    return lengths


def exchange_sizes(length: int, group: Group, device: torch.device | str = "cpu") -> list[int]:
    """Return every rank's ``length``, for shards of any lengths (batches of different sizes).

    On torch's fake process group, which has no other ranks, all lengths equal this rank's.
    """
    if group.is_alone:
        return [length] * group.size
    own = torch.tensor(length, dtype=torch.int64, device=device)
    return [int(n) for n in async_ops.gather_numbers(own, group).tolist()]


def exchange_async(
    moves: Sequence[tuple[Tensor, Move]], group: Group, meanwhile: Callable[[], None] | None = None
) -> AsyncResult[tuple[Tensor, ...]]:
    """Start several moves in one message to each rank; the gradients return in one message too.

    Tensors without gradients are moved only forward. ``meanwhile`` is called by the backward pass while it waits.
    """
    tensors, kinds = [x for x, _ in moves], [move for _, move in moves]

    def forward(values: Sequence[Tensor]) -> Sequence[AsyncResult[Tensor]]:
        return async_ops.start_exchange(list(zip(values, kinds, strict=True)), group)

    def backward(gradients: Sequence[Tensor | None]) -> Sequence[AsyncResult[Tensor]]:
        pairs = zip(gradients, kinds, strict=True)
        back = [(gradient, move.adjoint) for gradient, move in pairs if gradient is not None]
        return async_ops.start_exchange(back, group)

    return differentiable(tensors, forward, backward, meanwhile)


def _move_async(x: Tensor, move: Move, group: Group) -> AsyncResult[Tensor]:
    joint = exchange_async([(x, move)], group)
    return AsyncResult(lambda: joint.wait()[0])


def gather_async(
    x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None, *, same_after: bool = False
) -> AsyncResult[Tensor]:
    """Start :func:`gather`."""
    dim = _axis(x, dim)
    lengths = _shards(x, dim, group, sizes)
    if not same_after:
        return _move_async(x, Move(before=Shards(dim, lengths), after=None), group)

    def own(gradient: Tensor) -> AsyncResult[Tensor]:
        start = sum(lengths[: group.rank])
        return completed(gradient.narrow(dim, start, lengths[group.rank]).contiguous())

    return differentiable_one(x, lambda t: async_ops.start_gather(t, dim, group, lengths), own)


def gather(
    x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None, *, same_after: bool = False
) -> Tensor:
    """Join the shards of all ranks along ``dim``; the gradient is reduce-scattered.

    Args:
        x: This rank's shard ``[..., sizes[rank], ...]``.
        dim: The sharded dimension.
        group: The ranks.
        sizes: Lengths of the shards; None if all are as long as this one (see :func:`exchange_sizes`).
        same_after: True if every rank computes the same from the result, and all share one loss. Then each rank takes
            its shard of its own gradient, without communication.

    Returns:
        ``[..., sum(sizes), ...]``, the same on every rank.
    """
    return gather_async(x, dim, group, sizes, same_after=same_after).wait()


def reduce_scatter(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Sum over the ranks, and keep this rank's shard ``[..., sizes[rank], ...]`` along ``dim``.

    The gradient is gathered. The term of each rank is ``[..., L, ...]``; without ``sizes`` shards are
    :func:`shard_sizes` of L.
    """
    dim = _axis(x, dim)
    lengths = _parts(x, dim, group, sizes)
    if group.size == 1:
        return x
    return _move_async(x, Move(before=None, after=Shards(dim, lengths)), group).wait()


def all_to_all_async(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    group: Group,
    *,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> AsyncResult[Tensor]:
    """Start :func:`all_to_all`."""
    split_dim, concat_dim = _axis(x, split_dim), _axis(x, concat_dim)
    if split_dim == concat_dim:
        raise ValueError(f"all_to_all: expected two different dimensions, found {split_dim} twice")
    cut = _parts(x, split_dim, group, split_sizes)
    joined = _shards(x, concat_dim, group, concat_sizes)
    return _move_async(x, Move(before=Shards(concat_dim, joined), after=Shards(split_dim, cut)), group)


def all_to_all(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    group: Group,
    *,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Reshard from dimension ``concat_dim`` to ``split_dim``; the gradient is resharded back.

    Args:
        x: Whole along ``split_dim``, a shard of length ``concat_sizes[rank]`` along ``concat_dim``.
        split_dim: The dimension that is sharded afterwards.
        concat_dim: The dimension that is whole afterwards.
        group: The ranks.
        split_sizes: Lengths of the new shards; :func:`shard_sizes` if None.
        concat_sizes: Lengths of the present shards; None if all are as long as this one.

    Returns:
        A shard of length ``split_sizes[rank]`` along ``split_dim``, whole along ``concat_dim``.
    """
    return all_to_all_async(
        x, split_dim, concat_dim, group, split_sizes=split_sizes, concat_sizes=concat_sizes
    ).wait()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; the gradient passes unchanged (Megatron's *g*).

    The gradient is right if every rank computes the same from the result, and all share one loss. If ranks compute
    different things, compose ``all_reduce_gradient(all_reduce(x, group), group)``.
    """
    return _reduced(x, group, forward=True)


def all_reduce_gradient(x: Tensor, group: Group) -> Tensor:
    """Return the tensor, the same on every rank; sum its gradient over the ranks (Megatron's *f*)."""
    return _reduced(x, group, forward=False)


def _reduced(x: Tensor, group: Group, *, forward: bool) -> Tensor:
    if group.size == 1:
        return x
    result: Tensor = _Reduction.apply(x, group, forward)
    return result


class _Reduction(Function):
    """Sum over the ranks, either of the tensor or of its gradient. A second derivative swaps them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward: bool) -> Tensor:
        ctx.group, ctx.forward = group, forward
        return async_ops.start_all_reduce(x.detach(), group).wait() if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(gradient, ctx.group, forward=not ctx.forward), None, None


def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """Send the tensor of one rank to every rank; the gradients are summed on that rank.

    The gradient is zero on the other ranks.

    ``x`` has the same shape and dtype on all ranks; ``source`` counts within the group.
    """
    if group.size == 1:
        return x
    return differentiable_one(
        x,
        lambda t: async_ops.start_broadcast(t, source, group),
        lambda gradient: async_ops.start_reduce(gradient, source, group),
    ).wait()


def redistribute_async(
    x: Tensor, dims: Sequence[int], source: Sequence[Box], target: Sequence[Box], group: Group
) -> AsyncResult[Tensor]:
    """Start to move each rank's box to another layout of boxes; the gradient is moved back.

    A layout has for each rank its part of each of the dimensions ``dims``. The parts cover each element once.
    """
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
