"""Asynchronous collectives: the only file that sends tensors by torch.distributed.

Every function starts one collective and returns at once; :meth:`AsyncResult.wait` returns the result. A group of one
rank sends nothing: the result is the tensor itself. Nothing here is differentiable (``collectives.py`` is). Only this
file chooses the primitive by backend and by evenness of shards. Gathers use the backend's own collective if shards
differ by at most one element of their length. Reduce-scatters of uneven shards are an all-to-all without padding.

:func:`drain`, :func:`broadcasts` and :func:`sums` run collectives one after another. Each overlaps with the work on the
result of the previous one, and a rank holds only the result in use and the one that it receives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.errors import LostProcessError, first_line
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comm.moves import Box, BoxMove, Move, Shards

# PyTorch 2.13 renamed both; PyTorch 2.11 has the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")

_GONE = re.compile(r"closed by peer|reset by peer|Broken pipe|[Tt]imed out waiting")


@dataclass
class AsyncResult(Generic[T]):
    """Result of a running collective, a tensor or several."""

    finish: Callable[[], T]  #: Makes the result from the filled buffers
    work: dist.Work | None = None  #: Handle to wait for; None if nothing is running
    sent: Tensor | None = None  #: Memory that is sent, kept while the collective runs

    def wait(self) -> T:
        """Return the result after every rank has sent its part; on a GPU the stream waits, not the host.

        Call it once: the buffers of the result are freed.

        Raises:
            LostCollectiveError: Another process ended, or did not answer in time.
        """
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                raise LostCollectiveError(
                    f"rank {dist.get_rank()} of {dist.get_world_size()} lost another process in a collective "
                    f"({first_line(error)}): that process ended, or did not call the same collective in time. Look "
                    "for the first error in the output of the other ranks, and start all of them again. Without an "
                    "error there, give all ranks as many batches and backward passes"
                ) from error
            self.work = self.sent = None
        finish, self.finish = self.finish, _refuse_second_wait
        return finish()


class LostCollectiveError(LostProcessError, RuntimeError):
    """Error of a collective that another rank did not join; PyTorch's own is a RuntimeError too."""


def is_lost(error: BaseException) -> bool:
    """Return True if a collective failed because another rank is gone; gloo says so only in its message."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and bool(_GONE.search(str(error)))
    )


def _refuse_second_wait() -> Any:
    raise RuntimeError("the result of a collective was asked for twice")


def completed(x: Tensor) -> AsyncResult[Tensor]:
    """Return a result that needs no communication."""
    return AsyncResult(lambda: x)


def _all_to_all(
    op: str, flat: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> tuple[Tensor, dist.Work]:
    """Send the next ``sent[i]`` elements to rank i, receive ``received[i]`` into one flat buffer."""
    buffer = flat.new_empty(sum(received))
    work = dist.all_to_all_single(
        buffer, flat, list(received), list(sent), group=group.process_group, async_op=True
    )
    group.report(op, (flat.numel() - sent[group.rank]) * flat.element_size())
    return buffer, work


# Alignment in bytes of a tensor's start in a buffer of several dtypes.
_ALIGNMENT = 16


def start_exchange(moves: Sequence[tuple[Tensor, Move]], group: Group) -> list[AsyncResult[Tensor]]:
    """Carry out several moves with one message to each rank; waiting for one result waits for all.

    Tensors may have any dtypes; at least one is moved.
    """
    if group.size == 1:
        return [completed(x) for x, _ in moves]
    if len(moves) == 1:
        ((x, move),) = moves
        if move.after is None and move.before is not None:
            return [start_gather(x, move.before.dim, group, move.before.sizes)]
        if move.before is None and move.after is not None:
            return [start_reduce_scatter(x, move.after.dim, group, move.after.sizes)]
    return _start_exchange(moves, group)


def _start_exchange(
    moves: Sequence[tuple[Tensor, Move | BoxMove]], group: Group
) -> list[AsyncResult[Tensor]]:
    """Start :func:`start_exchange` as one all-to-all, for any moves."""
    dtypes = {x.dtype for x, _ in moves}
    mixed = len(dtypes) > 1
    unit = torch.uint8 if mixed else dtypes.pop()
    op = moves[0][1].op if len(moves) == 1 else "all_to_all"
    even = [(x, move) for x, move in moves if isinstance(move, Move) and move.even]
    if len(even) == len(moves):
        return _exchange_even(op, even, unit, group)

    def numbers(shapes: Sequence[Sequence[torch.Size]]) -> list[list[int]]:
        return [
            [_room(shape.numel() * (x.element_size() if mixed else 1), mixed) for shape in each]
            for (x, _), each in zip(moves, shapes, strict=True)
        ]

    pieces = [move.pieces(x) for x, move in moves]
    shapes = [move.shapes(x, group.rank) for x, move in moves]
    sent, received = numbers([[piece.shape for piece in each] for each in pieces]), numbers(shapes)
    first = moves[0][0]
    flat = torch.empty(sum(map(sum, sent)), dtype=unit, device=first.device)
    to_rank = [list(each) for each in zip(*sent, strict=True)]
    from_rank = [list(each) for each in zip(*received, strict=True)]
    places = flat.split([number for each in to_rank for number in each])
    ordered = [piece for each in zip(*pieces, strict=True) for piece in each]
    torch._foreach_copy_(
        [_typed(place, piece.dtype, piece.shape) for place, piece in zip(places, ordered, strict=True)],
        ordered,
    )
    buffer, work = _all_to_all(op, flat, [*map(sum, to_rank)], [*map(sum, from_rank)], group)
    parts = buffer.split([number for each in from_rank for number in each])

    def finish(move: Move | BoxMove, dtype: torch.dtype, index: int) -> Tensor:
        own = parts[index :: len(shapes)]
        return move.join([_typed(part, dtype, shape) for part, shape in zip(own, shapes[index], strict=True)])

    # The sent memory is kept only while the message runs.
    return [
        AsyncResult(partial(finish, move, x.dtype, index), work, flat)
        for index, (x, move) in enumerate(moves)
    ]


def _exchange_even(
    op: str, moves: Sequence[tuple[Tensor, Move]], unit: torch.dtype, group: Group
) -> list[AsyncResult[Tensor]]:
    """Start :func:`start_exchange` for pieces of equal size; a few tensors have an axis for the ranks."""
    mixed = unit != moves[0][0].dtype
    stacked = [move.stacked(x) for x, move in moves]
    numbers = [_room(x.numel() // group.size * (x.element_size() if mixed else 1), mixed) for x in stacked]
    if len(moves) == 1:
        flat = stacked[0].contiguous().view(-1)
    else:
        flat = torch.empty(group.size * sum(numbers), dtype=unit, device=stacked[0].device)
        places = flat.view(group.size, -1).split(numbers, 1)
        torch._foreach_copy_(
            [_typed(place, x.dtype, x.shape) for place, x in zip(places, stacked, strict=True)], stacked
        )
    each = [sum(numbers)] * group.size
    buffer, work = _all_to_all(op, flat, each, each, group)
    parts = buffer.view(group.size, -1).split(numbers, 1)

    def finish(move: Move, dtype: torch.dtype, shape: torch.Size, index: int) -> Tensor:
        return move.join_stacked(_typed(parts[index], dtype, (group.size, *shape)))

    return [
        AsyncResult(partial(finish, move, x.dtype, move.shapes(x, group.rank)[0], index), work, flat)
        for index, (x, move) in enumerate(moves)
    ]


def _room(number: int, mixed: bool) -> int:
    """Return a number of elements, or of bytes with padding."""
    return -(-number // _ALIGNMENT) * _ALIGNMENT if mixed else number


def _typed(place: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the beginning of a piece of a buffer ``[n]``, or of pieces ``[P, n]``, as a tensor."""
    if place.dtype != dtype:
        place = place.view(dtype)
    count = math.prod(shape[place.dim() - 1 :])
    return place[..., :count].view(shape)


def start_gather(x: Tensor, dim: int, group: Group, sizes: Sequence[int]) -> AsyncResult[Tensor]:
    """Concatenate the shards of all ranks along ``dim``; ``sizes`` are their lengths."""
    if group.size == 1:
        return completed(x)
    longest, shortest, move = max(sizes), min(sizes), Move(before=Shards(dim, sizes), after=None)
    # A rank with an empty shard would send a whole element in the padded gather.
    if longest - shortest > 1 or (longest and not shortest):
        (gathered,) = _start_exchange([(x, move)], group)
        return gathered
    # Shards that are one element shorter are padded: an all-to-all would copy the shard for each rank.
    shape = torch.Size((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
    own = x.contiguous() if x.shape[dim] == longest else x.new_zeros(shape)
    if own.shape != x.shape:
        own.narrow(dim, 0, x.shape[dim]).copy_(x)
    flat = x.new_empty(group.size * own.numel())
    work = _all_gather(flat, own.view(-1), group=group.process_group, async_op=True)
    group.report("all_gather", (group.size - 1) * own.numel() * own.element_size())
    shards = flat.view(group.size, *shape)
    if move.even:
        # One operation for all ranks' shards: hundreds of views would take longer than the communication.
        return AsyncResult(lambda: move.join_stacked(shards), work, own)
    return AsyncResult(
        lambda: move.join([shard.narrow(dim, 0, size) for shard, size in zip(shards, sizes, strict=True)]),
        work,
        own,
    )


def gather_numbers(own: Tensor, group: Group) -> Tensor:
    """Gather a tensor of one shape ``[...]`` from every rank to ``[ranks, ...]``, without a wait of the host."""
    return start_gather(own[None].contiguous(), 0, group, [1] * group.size).wait()


def start_reduce_scatter(x: Tensor, dim: int, group: Group, sizes: Sequence[int]) -> AsyncResult[Tensor]:
    """Sum over the ranks; this rank keeps its shard along ``dim``."""
    if group.size == 1:
        return completed(x)
    shards = Shards(dim, sizes)
    if shards.even and group.backend != "gloo":
        stacked = x.unflatten(dim, (group.size, sizes[0])).movedim(dim, 0).contiguous()
        out = x.new_empty(stacked.shape[1:])
        work = _reduce_scatter(out.view(-1), stacked.view(-1), group=group.process_group, async_op=True)
        group.report("reduce_scatter", (group.size - 1) * out.numel() * out.element_size())
        return AsyncResult(lambda: out, work, stacked)
    # gloo reduces the whole tensor on every rank; exchanging shards and adding them here sends half as much.
    (reduced,) = _start_exchange([(x, Move(before=None, after=shards))], group)
    return reduced


def start_all_reduce(x: Tensor, group: Group) -> AsyncResult[Tensor]:
    """Sum over the ranks, on every rank."""
    if group.size == 1:
        return completed(x)
    out = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(out, group=group.process_group, async_op=True)
    group.report("all_reduce", 2 * (group.size - 1) / group.size * out.numel() * out.element_size())
    return AsyncResult(lambda: out, work)


def start_broadcast(x: Tensor, source: int, group: Group) -> AsyncResult[Tensor]:
    """Send the tensor of rank ``source`` to every rank; the others pass one of its shape."""
    if group.size == 1:
        return completed(x)
    # The source's tensor is only read. Other ranks' tensors would be overwritten, so they get new memory.
    out = x.contiguous() if group.rank == source else x.new_empty(x.shape)
    work = dist.broadcast(out, group=group.process_group, group_src=source, async_op=True)
    group.report("broadcast", (group.size - 1) / group.size * out.numel() * out.element_size())
    return AsyncResult(lambda: out, work)


def start_reduce(x: Tensor, target: int, group: Group) -> AsyncResult[Tensor]:
    """Sum over the ranks on rank ``target`` of the group; other ranks get zeros."""
    if group.size == 1:
        return completed(x)
    out = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(out, group=group.process_group, group_dst=target, async_op=True)
    group.report("reduce", (group.size - 1) / group.size * out.numel() * out.element_size())
    # The other ranks' buffers hold partial sums afterwards.
    return AsyncResult(lambda: out if group.rank == target else out.zero_(), work)


def start_shift(x: Tensor, offset: int, group: Group, dim: int, sizes: Sequence[int]) -> AsyncResult[Tensor]:
    """Send to the rank ``offset`` further round the ring, and receive from the one ``offset`` before.

    ``sizes`` are the lengths along ``dim`` of each rank's tensor. ``x`` must not change before the wait.
    """
    if group.size == 1:
        return completed(x)
    target, source = (group.rank + offset) % group.size, (group.rank - offset) % group.size
    flat, shape = x.contiguous().view(-1), torch.Size((*x.shape[:dim], sizes[source], *x.shape[dim + 1 :]))
    sent = [len(flat) if rank == target else 0 for rank in range(group.size)]
    received = [shape.numel() if rank == source else 0 for rank in range(group.size)]
    is_silent = not len(flat) and shape.numel() > 0
    if is_silent:
        # PyTorch's fake ranks refuse a rank that only receives, so it sends an element to itself.
        flat, sent[group.rank], received[group.rank] = x.new_zeros(1), 1, 1
    buffer, work = _all_to_all("shift", flat, sent, received, group)
    if is_silent:
        buffer = buffer[1:] if group.rank < source else buffer[:-1]
    return AsyncResult(lambda: buffer.view(shape), work, flat)


def start_redistribute(
    x: Tensor, dims: Sequence[int], source: Sequence[Box], target: Sequence[Box], group: Group
) -> AsyncResult[Tensor]:
    """Move boxes from one layout to another; arguments as of :class:`~fastfold.parallel.comm.moves.BoxMove`."""
    (moved,) = _start_exchange([(x, BoxMove(dims, source, target, group.rank))], group)
    return moved


def drain(started: Iterable[Sequence[AsyncResult[Tensor]]]) -> Iterator[list[Tensor]]:
    """Yield results of collectives in order, after starting the following ones."""
    under_way: Sequence[AsyncResult[Tensor]] = ()
    for pending in started:
        done, under_way = under_way, pending
        if done:
            yield [each.wait() for each in done]
    if under_way:
        yield [each.wait() for each in under_way]


def broadcasts(piece: Callable[[int], Tensor], owners: Sequence[int], group: Group) -> Iterator[Tensor]:
    """Yield every panel's piece, from the rank of the group that owns it; other ranks give :func:`absent` ones."""
    started = ([start_broadcast(piece(panel), owner, group)] for panel, owner in enumerate(owners))
    for arrived in drain(started):
        yield arrived.pop()


def shards_in_turn(
    own: Tensor, dim: int, sizes: Sequence[int], group: Group, owners: Sequence[int] | None = None
) -> Iterator[Tensor]:
    """Yield the shards along ``dim`` of all ranks, or of ``owners`` in their order; the next one is sent meanwhile.

    ``sizes`` are the lengths of all ranks' shards.
    """
    owners = range(group.size) if owners is None else owners

    def piece(number: int) -> Tensor:
        shape = list(own.shape)
        shape[dim] = sizes[owners[number]]
        return own if owners[number] == group.rank else absent(own, *shape)

    return broadcasts(piece, owners, group)


def absent(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor of a shape that takes no memory, for a piece that another rank owns."""
    return like.new_empty(()).expand(shape)


def sums(terms: Iterable[Tensor], owners: Sequence[int], group: Group) -> list[Tensor]:
    """Sum each panel's terms over the ranks; return the sums that this rank owns.

    Terms are computed one at a time; the other arguments are those of :func:`broadcasts`.
    """
    pairs = zip(owners, terms, strict=True)
    started = ([start_reduce(term, owner, group)] for owner, term in pairs)
    own: list[Tensor] = []
    for owner, arrived in zip(owners, drain(started), strict=True):
        if owner == group.rank:
            own += arrived
        arrived.clear()  # zip holds the list until its next item
    return own
