"""Starting collectives: the only file that talks to torch.distributed about tensors.

Every function starts one collective and returns at once; :meth:`AsyncResult.wait` gives the result. Nothing here
is differentiable (``collectives.py`` is), and the choice of the primitive by backend and by evenness is made
here alone: even shards use the backend's own collective, uneven ones an all-to-all of exactly the bytes
that are needed, because the backends' gather and reduce-scatter want equal shards and padding would
send and hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.parallel.comm.groups import Group

# PyTorch 2.13 renamed both; the older names stay for 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Box = tuple[slice, ...]
"""Which part of each dimension, with start and stop given."""


@dataclass
class AsyncResult:
    """A collective under way.

    Attributes:
        finish: Makes the result of the buffers once they are filled.
        work: What to wait for; None if nothing is under way.
        sent: What leaves from, which has to stay as long as it is under way.
    """

    finish: Callable[[], Tensor]
    work: dist.Work | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once every rank has sent its part (on a GPU: the stream waits, not the host).

        To be asked for once: the buffers that it is made of are let go.
        """
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        finish, self.finish = self.finish, _taken
        return finish()


def _taken() -> Tensor:
    raise RuntimeError("the result of a collective was asked for twice")


def completed(x: Tensor) -> AsyncResult:
    """A result that needs no communication."""
    return AsyncResult(lambda: x)


def drain(started: Iterable[Sequence[AsyncResult]]) -> Iterator[list[Tensor]]:
    """Results of collectives, each waited for when the ones after it have been started."""
    under_way: Sequence[AsyncResult] = ()
    for pending in started:
        done, under_way = under_way, pending
        if done:
            yield [each.wait() for each in done]
    if under_way:
        yield [each.wait() for each in under_way]


def _even(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) == 1


def _exchange(
    op: str, pieces: Sequence[Tensor], received: Sequence[int], group: Group
) -> tuple[Tensor, dist.Work, Tensor]:
    """Send piece i to rank i and receive ``received[i]`` elements from it, into one flat buffer.

    Returns:
        The buffer, what to wait for, and the memory that is sent.
    """
    numbers = [piece.numel() for piece in pieces]
    flat = pieces[0].new_empty(sum(numbers))
    # One pass over pieces with gaps, where joining them would take two.
    places = [place.view(piece.shape) for place, piece in zip(flat.split(numbers), pieces, strict=True)]
    torch._foreach_copy_(places, list(pieces))
    buffer = flat.new_empty(sum(received))
    work = dist.all_to_all_single(
        buffer, flat, list(received), numbers, group=group.process_group, async_op=True
    )
    group.report(op, (flat.numel() - numbers[group.rank]) * flat.element_size())
    return buffer, work, flat


def _start_join(
    op: str, pieces: Sequence[Tensor], shapes: Sequence[torch.Size], dim: int, group: Group
) -> AsyncResult:
    """Send piece i to rank i, and concatenate along ``dim`` what the ranks send, of these shapes."""
    numbers = [shape.numel() for shape in shapes]
    buffer, work, sent = _exchange(op, pieces, numbers, group)

    def finish() -> Tensor:
        parts = buffer.split(numbers)
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)

    return AsyncResult(finish, work, sent)


def start_gather(x: Tensor, dim: int, group: Group, sizes: Sequence[int]) -> AsyncResult:
    """Concatenate the shards of all ranks along ``dim``; ``sizes`` are their lengths."""
    x = x.contiguous()
    if _even(sizes):
        flat = x.new_empty(group.size * x.numel())
        work = _all_gather(flat, x.view(-1), group=group.process_group, async_op=True)
        group.report("all_gather", (group.size - 1) * x.numel() * x.element_size())
        # One operation for all ranks' shards: hundreds of views would take longer than the communication.
        shards = flat.view(group.size, *x.shape)
        return AsyncResult(lambda: shards.movedim(0, dim).flatten(dim, dim + 1), work, x)
    shapes = [torch.Size((*x.shape[:dim], size, *x.shape[dim + 1 :])) for size in sizes]
    return _start_join("all_gather", [x] * group.size, shapes, dim, group)


def start_reduce_scatter(x: Tensor, dim: int, group: Group, sizes: Sequence[int]) -> AsyncResult:
    """Sum over the ranks, of which this rank keeps its shard along ``dim``."""
    if _even(sizes) and group.backend != "gloo" and x.dtype not in (torch.bfloat16, torch.float16):
        stacked = x.unflatten(dim, (group.size, sizes[0])).movedim(dim, 0).contiguous()
        out = x.new_empty(stacked.shape[1:])
        work = _reduce_scatter(out.view(-1), stacked.view(-1), group=group.process_group, async_op=True)
        group.report("reduce_scatter", (group.size - 1) * out.numel() * out.element_size())
        return AsyncResult(lambda: out, work, stacked)
    # gloo reduces the whole tensor on every rank; exchanging the shards and adding them here sends half of that. And
    # backends round half precision after every addition, where a sum over hundreds of ranks is to be rounded once.
    pieces = x.split(list(sizes), dim)
    shape = pieces[group.rank].shape
    buffer, work, sent = _exchange("reduce_scatter", pieces, [shape.numel()] * group.size, group)
    return AsyncResult(lambda: buffer.view(group.size, *shape).sum(0), work, sent)


def start_all_to_all(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    group: Group,
    split_sizes: Sequence[int],
    concat_sizes: Sequence[int],
) -> AsyncResult:
    """Cut ``split_dim`` into shards for the ranks, and join what they send along ``concat_dim``."""
    pieces = x.split(list(split_sizes), split_dim)
    shapes = []
    for size in concat_sizes:
        shape = list(x.shape)
        shape[split_dim] = split_sizes[group.rank]
        shape[concat_dim] = size
        shapes.append(torch.Size(shape))
    return _start_join("all_to_all", pieces, shapes, concat_dim, group)


def start_all_reduce(x: Tensor, group: Group) -> AsyncResult:
    """Sum over the ranks, on every rank."""
    out = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(out, group=group.process_group, async_op=True)
    group.report("all_reduce", 2 * (group.size - 1) / group.size * out.numel() * out.element_size())
    return AsyncResult(lambda: out, work)


def start_broadcast(x: Tensor, source: int, group: Group) -> AsyncResult:
    """The tensor of rank ``source`` of the group, on every rank; the others give one of its shape."""
    # The source's own tensor is only read; another's is written, so the one given is left alone.
    out = x.contiguous() if group.rank == source else x.new_empty(x.shape)
    work = dist.broadcast(out, group=group.process_group, group_src=source, async_op=True)
    group.report("broadcast", (group.size - 1) / group.size * out.numel() * out.element_size())
    return AsyncResult(lambda: out, work)


def start_reduce(x: Tensor, target: int, group: Group) -> AsyncResult:
    """Sum over the ranks on rank ``target`` of the group, zeros on the others."""
    out = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(out, group=group.process_group, group_dst=target, async_op=True)
    group.report("reduce", (group.size - 1) / group.size * out.numel() * out.element_size())
    # The other ranks' buffers hold partial sums afterwards.
    return AsyncResult(lambda: out if group.rank == target else out.zero_(), work)


def start_shift(x: Tensor, offset: int, group: Group, dim: int, sizes: Sequence[int]) -> AsyncResult:
    """Send to the rank ``offset`` further round the ring, receive from the one ``offset`` before.

    ``sizes`` are the lengths along ``dim`` of what each rank sends.
    """
    target, source = (group.rank + offset) % group.size, (group.rank - offset) % group.size
    empty = x.new_empty(0)
    shape = torch.Size((*x.shape[:dim], sizes[source], *x.shape[dim + 1 :]))
    received = [shape.numel() if rank == source else 0 for rank in range(group.size)]
    pieces = [x if rank == target else empty for rank in range(group.size)]
    buffer, work, sent = _exchange("shift", pieces, received, group)
    return AsyncResult(lambda: buffer.view(shape), work, sent)


def start_redistribute(
    x: Tensor, dims: Sequence[int], source: Sequence[Box], target: Sequence[Box], group: Group
) -> AsyncResult:
    """Move what the ranks hold from one layout to another; every element of the target lies in one source.

    ``dims`` are the dimensions that the boxes are about, ``source`` and ``target`` the box of each rank. The other
    dimensions are whole.
    """
    held, wanted = source[group.rank], target[group.rank]
    pieces = [_cut(x, dims, held, [_common(*pair) for pair in zip(held, box, strict=True)]) for box in target]
    found = [[_common(*pair) for pair in zip(box, wanted, strict=True)] for box in source]
    shapes = [_box_shape(x.shape, dims, box) for box in found]
    shape = _box_shape(x.shape, dims, wanted)
    numbers = [part.numel() for part in shapes]
    buffer, work, sent = _exchange("all_to_all", pieces, numbers, group)

    def finish() -> Tensor:
        out = buffer.new_empty(shape)
        for part, size, box in zip(buffer.split(numbers), shapes, found, strict=True):
            _cut(out, dims, wanted, box).copy_(part.view(size))
        return out

    return AsyncResult(finish, work, sent)


def _common(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def _box_shape(shape: torch.Size, dims: Sequence[int], box: Sequence[slice]) -> torch.Size:
    found = list(shape)
    for dim, part in zip(dims, box, strict=True):
        found[dim] = part.stop - part.start
    return torch.Size(found)


def _cut(x: Tensor, dims: Sequence[int], held: Box, box: Sequence[slice]) -> Tensor:
    """The part ``box`` of a tensor that holds ``held``."""
    for dim, here, part in zip(dims, held, box, strict=True):
        length = part.stop - part.start
        # An empty part may lie outside.
        x = x.narrow(dim, part.start - here.start if length else 0, length)
    return x
