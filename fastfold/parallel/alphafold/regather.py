"""Operators on something gathered that is gathered again in the backward pass, so that only shards are kept.

The operators' own backward passes need nothing of their forward passes but the inputs, so they are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fastfold.evoformer.attention import Attention
from fastfold.evoformer.primitives import LayerNorm
from fastfold.kernels.ops.attention.op import attention_backend
from fastfold.kernels.ops.outer_product_mean.op import EPS
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm import async_ops


class RegatheringLayer(nn.Module):
    """A layer that gathers something from all ranks.

    Attributes:
        shards: The cut.
        keeps_gathered: Whether it keeps that for its backward pass: where blocks are recomputed, which regathers it
            anyway.
    """

    shards: AxialShards
    keeps_gathered: bool = False

    def regathers(self, pair: Tensor) -> bool:
        """Whether the backward pass gathers again.

        Not on more ranks than the pair ``[*, rows, columns, c_z]`` has channels, which send the terms of all triangle
        products (``axial/matmul.py``), as much as may be.
        """
        few = self.shards.group.size <= pair.shape[-1]
        return few and not self.keeps_gathered and torch.is_grad_enabled()


class _OuterProduct(Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        pair: Tensor,
        left_mask: Tensor,
        right_mask: Tensor,
        weight: Tensor,
        bias: Tensor,
        shards: AxialShards,
    ) -> Tensor:
        ctx.save_for_backward(left, right, left_mask, right_mask, weight, bias)
        ctx.shards = shards
        whole = _whole(left, -2, shards, left_mask.shape[-1])
        masks = left_mask, right_mask
        out: Tensor = torch.ops.fastfold.outer_product_mean(
            whole, right, *masks, weight, bias, EPS, pair, None
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, left_mask, right_mask, weight, bias = ctx.saved_tensors
        residues = left_mask.shape[-1]
        whole = _whole(left, -2, ctx.shards, residues)
        arguments = (grad, whole, right, left_mask, right_mask, weight, bias, EPS, [True] * 4, None)
        of_left, of_right, *rest = torch.ops.fastfold.outer_product_mean_backward(*arguments)
        own = _summed(of_left, -2, ctx.shards, residues)
        return own, of_right, grad, None, None, *rest, None


def outer_product_regathered(
    left: Tensor,
    right: Tensor,
    pair: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    shards: AxialShards,
) -> Tensor:
    """:func:`fastfold.kernels.outer_product_mean` with the left projections of all ranks, as an update of a pair.

    Args:
        left: ``[*, S, n, c]``, this rank's residues.
        right: ``[*, S, n, c]``, the same.
        pair: ``[*, N, n, c_z]``.
        left_mask: ``[*, S, N]``.
        right_mask: ``[*, S, n]``.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        shards: The cut of the residues.
    """
    out: Tensor = _OuterProduct.apply(left, right, pair, left_mask, right_mask, weight, bias, shards)
    return out


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        mask: Tensor,
        dropout: Tensor | None,
        cut: int,
        shards: AxialShards,
        heads: int,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, bias, mask, dropout, *parameters)
        ctx.cut, ctx.shards, ctx.heads = cut, shards, heads
        assert parameters[2] is not None  # the queries' projection
        ctx.backend = attention_backend(x, len(parameters[2]) // heads, None)
        whole = _whole(bias, cut, shards, x.shape[-2])
        rest = (None, True, dropout, ctx.backend)
        out: Tensor = torch.ops.fastfold.gated_attention(x, whole, mask, heads, *rest, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, mask, dropout, *parameters = ctx.saved_tensors
        whole = _whole(bias, ctx.cut, ctx.shards, x.shape[-2])
        rest = (True, dropout, ctx.backend, True)
        found = iter(
            torch.ops.fastfold.gated_attention_backward(grad, x, whole, mask, ctx.heads, *rest, *parameters)
        )
        grad_x, of_bias = next(found), next(found)
        own = _summed(of_bias, ctx.cut, ctx.shards, x.shape[-2]).to(bias.dtype)
        of_parameters = (None if p is None else next(found) for p in parameters)
        return grad_x, own, None, None, None, None, None, *of_parameters


def attention_regathered(
    norm: LayerNorm,
    attention: Attention,
    x: Tensor,
    bias: Tensor,
    cut: int,
    mask: Tensor,
    dropout: Tensor | None,
    shards: AxialShards,
) -> Tensor:
    """``x + dropout * attention(norm(x))`` with a bias of which every rank has a shard.

    Args:
        norm: Layer norm of the branch.
        attention: Its attention.
        x: ``[*, R, N, c]``; attention is along N.
        bias: This rank's shard of ``[*, H, N, N]``.
        cut: The dimension in which it is one, -2 or -1.
        mask: ``[*, R, N]``, 0 for keys that must not be seen.
        dropout: Factors that broadcast against ``x``, or None.
        shards: The cut.
    """
    gate = attention.gate
    out: Tensor = _Attention.apply(
        x,
        bias,
        mask,
        dropout,
        cut,
        shards,
        attention.heads,
        norm.weight,
        norm.bias,
        attention.query.weight,
        attention.key.weight,
        attention.value.weight,
        None if gate is None else gate.weight,
        None if gate is None else gate.bias,
        attention.output.weight,
        attention.output.bias,
    )
    return out


def _whole(x: Tensor, dim: int, shards: AxialShards, length: int) -> Tensor:
    return async_ops.start_gather(x, x.dim() + dim, shards.group, shards.sizes(length)).wait()


def _summed(x: Tensor, dim: int, shards: AxialShards, length: int) -> Tensor:
    """The sum over the ranks, of which this rank keeps its shard."""
    return async_ops.start_reduce_scatter(x, x.dim() + dim, shards.group, shards.sizes(length)).wait()


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result, of which only the arguments are kept for the backward pass; it draws no numbers."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
