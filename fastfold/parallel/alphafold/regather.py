"""Operators whose gathered input is gathered again in the backward pass, so that only shards are kept.

The operators' own backward passes need only the inputs of their forward passes, so they are called unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fastfold.evoformer.attention import Attention, kernel_parameters
from fastfold.evoformer.execution import check_part, check_parts
from fastfold.evoformer.primitives import LayerNorm
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.layout import MAX_CHANNELS, MAX_HEAD_CHANNELS
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
from fastfold.kernels.ops.gated_attention.op import gated_attention_begin
from fastfold.kernels.ops.gated_attention.passes import gradients_of_parameters
from fastfold.kernels.ops.outer_product_mean.op import EPS
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import first_order
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comm.moves import Move, Shards

Regather = Callable[[], Tensor]  #: Function that gathers a tensor of the forward pass again


class Regathered:
    """Tensors that are gathered in a forward pass, and again in its backward pass.

    All are gathered again in one message. It does not wait for gradients, because the shards are kept.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._moves: list[tuple[Tensor, Move]] = []
        self._pending: dict[int, AsyncResult[Tensor]] = {}

    def add(self, x: Tensor, move: Move) -> Regather:
        """Keep a shard, and return a function that returns the whole in the backward pass."""
        number = len(self._moves)
        self._moves.append((x.detach(), move))

        def again() -> Tensor:
            if number not in self._pending:
                self._pending = {}
                self.start()
            return self._pending.pop(number).wait()

        return again

    def start(self) -> None:
        """Start gathering, unless it has started."""
        if not self._pending:
            self._pending = dict(enumerate(async_ops.start_exchange(self._moves, self._group)))

    def started_by(self, x: Tensor) -> Tensor:
        """Return ``x``; its gradient starts the gathering when the backward pass reaches it."""
        # A node of its own: the engine runs it before the other work of the block.
        started: Tensor = _Starting.apply(x, self) if self._moves else x
        return started


class _Starting(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, regathered: Regathered) -> Tensor:
        ctx.regathered = regathered
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.regathered.start()
        return grad, None


class RegatheringLayer(nn.Module):
    """A layer that gathers a tensor from all ranks."""

    shards: AxialShards  #: The cut
    #: True if the layer keeps gathered tensors for its backward pass. In recomputed blocks the recomputation gathers
    #: them again anyway.
    keeps_gathered: bool = False

    def regathers(self, pair: Tensor) -> bool:
        """Return True if the backward pass gathers again.

        It does not if there are more ranks than the pair ``[*, rows, columns, c_z]`` has channels: they already send
        the most, the terms of all triangle products (``axial/matmul.py``).
        """
        few = self.shards.group.size <= pair.shape[-1]
        return few and not self.keeps_gathered and torch.is_grad_enabled()

    def move(self, x: Tensor, dim: int, length: int) -> Move:
        """Return the move that gathers a shard along ``dim``, counted from the back, of an axis of ``length``."""
        return Move(before=Shards(x.dim() + dim, self.shards.sizes(length)), after=None)

    def gathered(self, x: Tensor, dim: int, length: int, pair: Tensor) -> tuple[Tensor, Regather | None]:
        """Gather the shards along ``dim``; return the whole and how to gather it again, or None."""
        move = self.move(x, dim, length)
        again = Regathered(self.shards.group).add(x, move) if self.regathers(pair) else None
        return self.shards.gather(x, dim, length), again


class RegatheredOuterProduct(Function):
    """:func:`fastfold.kernels.outer_product_mean` as a pair's update, with a side that is not kept.

    ``masks`` are those of both sides, the parameters weight and bias. ``again`` has a function that gathers the side
    again, and None for the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        pair: Tensor,
        masks: tuple[Tensor, Tensor],
        again: tuple[Regather | None, Regather | None],
        *parameters: Tensor,
    ) -> Tensor:
        sides = [x if gather is None else None for x, gather in zip((left, right), again, strict=True)]
        ctx.save_for_backward(*sides, *masks, *parameters)
        ctx.again, ctx.backend = again, choose_backend(left, fits=pair.shape[-1] <= MAX_CHANNELS)
        out: Tensor = torch.ops.fastfold.outer_product_mean(
            [left, right], masks, parameters, pair, EPS, ctx.backend
        )
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *sides, left_mask, right_mask, weight, bias = ctx.saved_tensors
        masks, parameters = [left_mask, right_mask], [weight, bias]
        whole = [x if gather is None else gather() for x, gather in zip(sides, ctx.again, strict=True)]
        of_left, of_right, *of_parameters = torch.ops.fastfold.outer_product_mean_backward(
            grad, whole, masks, parameters, EPS, [True] * 4, ctx.backend
        )
        return of_left, of_right, grad, None, None, *of_parameters


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        mask: Tensor,
        dropout: Tensor | None,
        settings: tuple[Regather | None, list[Tensor], dict[str, Any]],
        *parameters: Tensor,
    ) -> Tensor:
        again, projections, options = settings
        ctx.save_for_backward(x, bias if again is None else None, mask, dropout, *parameters)
        ctx.again, ctx.projections, ctx.options, ctx.begin = again, None, options, _Attention.begin
        out: Tensor = torch.ops.fastfold.gated_attention_begun(
            x, projections, bias, mask, dropout, parameters, **options
        )
        return out

    @staticmethod
    def begin(ctx: Any) -> None:
        # Saved tensors are read once: activation checkpointing returns them a single time.
        x, *others = saved = ctx.saved_tensors
        parameters = GatedAttentionParams.of(others[3:])
        ctx.projections = saved, gated_attention_begin(x, parameters, **ctx.options, backward=True)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, bias, mask, dropout, *parameters), projections = ctx.projections or (ctx.saved_tensors, [])
        ctx.projections = None
        bias = bias if ctx.again is None else ctx.again()
        gradients = iter(
            torch.ops.fastfold.gated_attention_backward(
                *(grad, x, projections, bias, mask, dropout, parameters),
                needs=[True, bias is not None, *ctx.needs_input_grad[5:]],
                add_x=True,
                **ctx.options,
            )
        )
        grad_x, of_bias = next(gradients), None if bias is None else next(gradients).to(bias.dtype)
        of_parameters = gradients_of_parameters(gradients, parameters)
        return grad_x, of_bias, None, None, None, *of_parameters


def _options(attention: Attention, x: Tensor) -> dict[str, Any]:
    heads = attention.heads
    channels = len(attention.query.weight) // heads
    return {"heads": heads, "backend": choose_backend(x, fits=channels <= MAX_HEAD_CHANNELS)}


def _parameters(norm: LayerNorm, attention: Attention) -> GatedAttentionParams:
    check_part(norm, "the norm of attention on a shard")
    check_part(attention, "attention on a shard")
    check_parts(attention)
    return kernel_parameters(norm, attention)


@torch.no_grad()
def begin_attention(norm: LayerNorm, attention: Attention, x: Tensor) -> list[Tensor]:
    """Compute the part of attention that needs ``x [*, R, N, c]`` only, while a bias is sent.

    Pass the result as ``projections`` to :func:`attention_regathered`.
    """
    return gated_attention_begin(x, _parameters(norm, attention), **_options(attention, x))


def attention_regathered(
    norm: LayerNorm,
    attention: Attention,
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    *,
    dropout: Tensor | None,
    again: Regather | None = None,
    projections: Sequence[Tensor] = (),
) -> Tensor:
    """Compute ``x + dropout * attention(norm(x))`` along N of ``x [*, R, N, c]``, with a gathered bias.

    The bias is ``[*, H, N, N]``, and the mask is ``[*, R, N]``. ``again`` gathers the bias again in the backward pass;
    None keeps it. ``projections`` is the result of :func:`begin_attention`, or empty.
    """
    settings = again, list(projections), _options(attention, x)
    out: Tensor = _Attention.apply(x, bias, mask, dropout, settings, *_parameters(norm, attention).present())
    return out


def begins_backward(out: Tensor) -> Callable[[], None]:
    """Return the part of an operator's backward pass that needs no gradient.

    Call it within a backward pass that reaches the operator. ``out`` is the result of :func:`attention_regathered`, or
    of another operator whose context has a ``begin``.
    """
    node: Any = out.grad_fn
    return (lambda: None) if node is None else lambda: node.begin(node)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and keep only its arguments for the backward pass; it draws no random numbers."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
