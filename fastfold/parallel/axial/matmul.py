"""Products of matrices, one for each channel, whose contracted axis is cut over the ranks of a group.

There are two ways to the same result. Either every rank multiplies its shards and the terms of the sum are
reduce-scattered: a rank sends O(N² c), for any number of ranks. Or the factors are resharded to whole matrices of some
channels, which are multiplied without communication, and the product is resharded back. This sends O(N² c / P) if
there are as many channels as ranks.

Whole matrices on a GPU are padded with zeros to multiples of 8 rows and columns, at which cuBLAS is fast.

Both ways work on blocks of channels. The communication of one block overlaps with the products of another, so a rank
never holds more than two blocks of whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from fastfold.kernels.common.layout import padded_width
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, drain
from fastfold.parallel.comm.collectives import first_order
from fastfold.parallel.comm.groups import Group, shard_slices
from fastfold.parallel.comm.moves import Move, Shards

CONTRACTIONS = ("auto", "terms", "channels")

# Minimum number of elements of a block of products, without and with gradients. Training keeps many other tensors.
_BLOCK, _TRAINING_BLOCK = 2**18, 2**25


@dataclass(frozen=True)
class ContractionSpec:
    """Layout of the contracted axis and of the result."""

    group: Group  #: The ranks
    contracted: Sequence[int]  #: Lengths of their shards of the contracted axis
    dim: int  #: The axis of the result that is cut, counted from the front
    sizes: Sequence[int]  #: Lengths of its shards
    #: True if the factors are cut along their other axis; ``contracted`` are then its shards. Such products have to be
    #: resharded to whole channels.
    free: bool = False


@dataclass(frozen=True)
class _Block:
    """Channels that are processed at a time: for each rank in order, the consecutive ones that it multiplies.

    They are slices, because a tensor of indices would have to be sent to a GPU.
    """

    parts: Sequence[slice]

    @property
    def sizes(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]

    def of(self, x: Tensor) -> Tensor:
        if sum(self.sizes) == x.shape[-3]:
            return x
        rows = [x[..., part, :, :] for part in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, -3)

    def put(self, x: Tensor, values: Tensor) -> None:
        if sum(self.sizes) == x.shape[-3]:
            x.copy_(values)
            return
        torch._foreach_copy_([x[..., part, :, :] for part in self.parts], values.split(self.sizes, -3))


def _channel_blocks(channels: int, ranks: int, step: int) -> list[_Block]:
    """Return blocks of at most ``step`` channels of each rank; the channels of a rank are consecutive."""
    own = shard_slices(channels, ranks)
    return [
        _Block([slice(min(x.start + first, x.stop), min(x.start + first + step, x.stop)) for x in own])
        for first in range(0, own[0].stop, step)
    ]


class _Terms(Function):
    """Products are sent while the next are computed. In the backward pass, gradients are fetched during products."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, spec: ContractionSpec, step: int) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.spec, ctx.blocks = spec, _channel_blocks(left.shape[-3], 1, step)
        out = _empty_result(left, right, spec)

        def terms() -> Iterator[list[AsyncResult[Tensor]]]:
            for block in ctx.blocks:
                product = padded_matmul(block.of(left), block.of(right).mT)
                yield [async_ops.start_reduce_scatter(product, spec.dim, spec.group, spec.sizes)]
                del product

        for block, summed in zip(ctx.blocks, drain(terms()), strict=True):
            block.put(out, summed.pop())  # zip holds the list until its next item
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        spec: ContractionSpec = ctx.spec
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        started = ([async_ops.start_gather(b.of(grad), spec.dim, spec.group, spec.sizes)] for b in ctx.blocks)
        for block, (whole,) in zip(ctx.blocks, drain(started), strict=True):
            block.put(grad_left, padded_matmul(whole, block.of(right)))
            block.put(grad_right, padded_matmul(whole.mT, block.of(left)))
        return grad_left, grad_right, None, None


class _Channels(Function):
    """Keep whole factors of this rank's channels: as much as its shards of all channels."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, spec: ContractionSpec, step: int) -> Tensor:
        ctx.spec, ctx.shapes = spec, (left.shape, right.shape)
        ctx.blocks = _channel_blocks(left.shape[-3], spec.group.size, step)
        ctx.cut = left.dim() - (2 if spec.free else 1)
        ctx.whole = [Move(Shards(ctx.cut, spec.contracted), None).whole(x)[-2:] for x in (left, right)]
        out, out_shape = _empty_result(left, right, spec), _product_shape(left, right, spec)
        keeps, kept = any(ctx.needs_input_grad), list[Tensor]()
        factors = (
            # One message for each factor if memory is short: a message's memory is freed when its tensor is complete.
            _to_channels([left, right], ctx.cut, spec.contracted, b, spec.group)
            if keeps
            else [_to_channels([x], ctx.cut, spec.contracted, b, spec.group)[0] for x in (left, right)]
            for b in ctx.blocks
        )

        def products() -> Iterator[list[AsyncResult[Tensor]]]:
            for block, both in zip(ctx.blocks, drain(factors), strict=True):
                if keeps:
                    kept.extend(both)
                product = (both[0] @ both[1].mT)[..., : out_shape[0], : out_shape[1]]
                both.clear()  # zip holds the list until its next item
                yield _to_channels([product], spec.dim, spec.sizes, block, spec.group, back=True)

        for block, joined in zip(ctx.blocks, drain(products()), strict=True):
            block.put(out, joined.pop())
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spec, kept = ctx.spec, ctx.saved_tensors
        grads = [grad.new_empty(shape) for shape in ctx.shapes]
        arriving = (_to_channels([grad], spec.dim, spec.sizes, b, spec.group) for b in ctx.blocks)

        def gradients() -> Iterator[list[AsyncResult[Tensor]]]:
            blocks = zip(ctx.blocks, drain(arriving), kept[::2], kept[1::2], strict=True)
            for block, (whole,), left, right in blocks:
                rows = zip((whole @ right, whole.mT @ left), ctx.whole, strict=True)
                both = [x[..., : shape[0], : shape[1]] for x, shape in rows]
                yield _to_channels(both, ctx.cut, spec.contracted, block, spec.group, back=True)

        for block, parts in zip(ctx.blocks, drain(gradients()), strict=True):
            for of_all, part in zip(grads, parts, strict=True):
                block.put(of_all, part)
        return *grads, None, None


def _empty_result(left: Tensor, right: Tensor, spec: ContractionSpec) -> Tensor:
    shape = [*left.shape[:-2], *_product_shape(left, right, spec)]
    shape[spec.dim] = spec.sizes[spec.group.rank]
    return left.new_empty(shape)


def _product_shape(left: Tensor, right: Tensor, spec: ContractionSpec) -> tuple[int, int]:
    if spec.free:
        return sum(spec.contracted), sum(spec.contracted)
    return left.shape[-2], right.shape[-2]


def _to_channels(
    tensors: Sequence[Tensor],
    dim: int,
    sizes: Sequence[int],
    block: _Block,
    group: Group,
    *,
    back: bool = False,
) -> list[AsyncResult[Tensor]]:
    """Start resharding from shards along ``dim`` of a block's channels to whole matrices, or ``back``.

    All tensors share one message.
    """
    moves = []
    for x in tensors:
        move = Move(before=Shards(dim, sizes), after=Shards(x.dim() - 3, block.sizes))
        if back:
            moves.append((x, move.adjoint))
        else:
            height, width = (_width(x, n) for n in move.whole(x)[-2:])
            moves.append((block.of(x), replace(move, filled=(height, width))))
    return async_ops.start_exchange(moves, group)


def _width(x: Tensor, n: int) -> int:
    """Return ``n`` rows or columns as padded on the device of ``x``."""
    return n if x.is_cpu else padded_width(n)


def padded_matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``a @ b`` for ``a [*, M, K]`` and ``b [*, K, N]``, padded to multiples of 8 on a GPU.

    ``out`` is memory for the result ``[*, M, N]``; None for new memory.
    """
    wide = [filled(x) for x in (a, b)]
    if all(x is y for x, y in zip(wide, (a, b), strict=True)):
        return torch.matmul(a, b, out=out)
    product = (wide[0] @ wide[1])[..., : a.shape[-2], : b.shape[-1]]
    return product if out is None else out.copy_(product)


def filled(x: Tensor) -> Tensor:
    """Pad matrices ``[*, M, N]`` with zeros to multiples of 8 on a GPU; return others unchanged."""
    rows, columns = (_width(x, n) - n for n in x.shape[-2:])
    return pad(x, (0, columns, 0, rows)) if rows or columns else x


def choose_contraction(way: str, a: int, b: int, k: int, channels: int, ranks: int) -> str:
    """Choose a method; ``auto`` takes the one that sends less, or ``terms`` below one channel per rank.

    The left matrices have ``a`` rows, the right ones ``b``, the contracted axis has length ``k``.

    Raises:
        ValueError: The method is unknown.
    """
    if way not in CONTRACTIONS:
        raise ValueError(f"contraction: expected one of {', '.join(CONTRACTIONS)}, found {way!r}")
    if way != "auto":
        return way
    # In units of (P - 1) / P times the channels: terms of the result, or factors and result divided by the ranks.
    less = (a + b) * k + a * b < ranks * a * b
    return "channels" if less and ranks <= channels else "terms"


def block_channels(per_channel: int, channels: int, ranks: int, *, training: bool = False) -> int:
    """Return the default number of channels that a rank multiplies at a time in :func:`contract`.

    Their products are at most a sixteenth of the result, and at most a quarter of this rank's share of it. Training
    keeps other tensors of such size, so its blocks may be as large as the share: larger blocks need fewer kernels and
    messages. Products of the usual training lengths are a single block. A channel's product has ``per_channel``
    elements.
    """
    parts, least = (max(4, ranks), _TRAINING_BLOCK) if training else (max(16, 4 * ranks), _BLOCK)
    return max(1, min(channels, max(least, channels * per_channel // parts) // per_channel))


def contract(
    left: Tensor,
    right: Tensor,
    spec: ContractionSpec,
    *,
    way: str = "auto",
    block_elements: int | None = None,
) -> Tensor:
    """Compute products ``left rightᵀ`` of every channel, summed over shards of the contracted axis.

    The backward pass sends as much as the forward pass. Between them this rank's shards of the factors are kept
    (``terms``), or as much in the channels' layout.

    Args:
        left: ``[*, c, A, k]``, this rank's part of the contracted axis (it may be empty); ``[*, c, a, K]`` if the
            other axis is cut.
        right: ``[*, c, B, k]``, the same part; or ``[*, c, b, K]``.
        spec: Layout of the factors and the result.
        way: ``terms``, ``channels``, or ``auto`` (:func:`choose_contraction`).
        block_elements: Elements of the products that a rank has at a time. By default memory falls as the number of
            ranks grows.

    Returns:
        This rank's shard of ``[*, c, A, B]``.

    Raises:
        ValueError: The method is unknown, the result lacks the axis, or ``terms`` is used with ``spec.free``.
    """
    if spec.free and way == "terms":
        raise ValueError("terms needs factors that are cut along the contracted axis; use channels")
    if spec.dim not in (left.dim() - 2, left.dim() - 1):
        raise ValueError(f"expected a cut of the result along one of its last two axes, found {spec.dim}")
    group, channels = spec.group, left.shape[-3]
    if group.size == 1:
        return left @ right.mT
    a, b = _product_shape(left, right, spec)
    k = left.shape[-1] if spec.free else sum(spec.contracted)
    way = "channels" if spec.free else choose_contraction(way, a, b, k, channels, group.size)
    per_channel = max(1, left.shape[:-3].numel() * a * b)
    if block_elements is None:
        step = block_channels(per_channel, channels, group.size, training=torch.is_grad_enabled())
    else:
        step = max(1, min(channels, block_elements // per_channel))
    result: Tensor = (_Channels if way == "channels" else _Terms).apply(left, right, spec, step)
    return result
