"""Operators on something gathered that is gathered again in the backward pass, so that only shards are kept.

The operators' own backward passes need nothing of their forward passes but the inputs, so they are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fastfold.evoformer.attention import Attention
from fastfold.evoformer.primitives import LayerNorm
from fastfold.kernels.common.backend import products_backend
from fastfold.kernels.ops.attention.op import attention_backend
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
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
        masks: tuple[Tensor, Tensor],
        shards: AxialShards,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(left, right, *masks, *parameters)
        ctx.shards, ctx.backend = shards, products_backend(left, pair.shape[-1], None)
        inputs = [_whole(left, -2, shards, masks[0].shape[-1]), right, *masks, *parameters]
        out: Tensor = torch.ops.fastfold.outer_product_mean(inputs, pair, EPS, ctx.backend)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, left_mask, *rest = ctx.saved_tensors
        residues = left_mask.shape[-1]
        inputs = [_whole(left, -2, ctx.shards, residues), right, left_mask, *rest]
        of_left, of_right, *of_parameters = torch.ops.fastfold.outer_product_mean_backward(
            grad, inputs, EPS, [True] * 4, ctx.backend
        )
        own = _summed(of_left, -2, ctx.shards, residues)
        return own, of_right, grad, None, None, *of_parameters


def outer_product_regathered(
    left: Tensor,
    right: Tensor,
    pair: Tensor,
    masks: tuple[Tensor, Tensor],
    weight: Tensor,
    bias: Tensor,
    shards: AxialShards,
) -> Tensor:
    """:func:`fastfold.kernels.outer_product_mean` with the left projections of all ranks, as an update of a pair.

    Args:
        left: ``[*, S, n, c]``, this rank's residues.
        right: ``[*, S, n, c]``, the same.
        pair: ``[*, N, n, c_z]``.
        masks: Of all residues, ``[*, S, N]``, and of this rank's, ``[*, S, n]``.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        shards: The cut of the residues.
    """
    out: Tensor = _OuterProduct.apply(left, right, pair, masks, shards, weight, bias)
    return out


class _BiasShards(NamedTuple):
    """Which dimension of a bias is cut, -2 or -1, and how."""

    cut: int
    shards: AxialShards

    def whole(self, bias: Tensor, length: int) -> Tensor:
        """That of all ranks, ``[*, H, N, N]``."""
        return _whole(bias, self.cut, self.shards, length)

    def summed(self, grad: Tensor, length: int) -> Tensor:
        """Of the sum over the ranks, this rank's shard."""
        return _summed(grad, self.cut, self.shards, length)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        mask: Tensor,
        dropout: Tensor | None,
        heads: int,
        shards: _BiasShards,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, bias, mask, dropout, *parameters)
        width = len(GatedAttentionParams._make(parameters).query_weight)
        backend = attention_backend(x, width // heads, None)
        ctx.shards, ctx.options = shards, {"heads": heads, "add_x": True, "backend": backend}
        whole = shards.whole(bias, x.shape[-2])
        out: Tensor = torch.ops.fastfold.gated_attention(
            x, whole, mask, None, dropout, *parameters, **ctx.options
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, mask, dropout, *parameters = ctx.saved_tensors
        tensors = (x, ctx.shards.whole(bias, x.shape[-2]), mask, dropout, *parameters)
        found = iter(
            torch.ops.fastfold.gated_attention_backward(grad, *tensors, **ctx.options, need_bias=True)
        )
        grad_x, of_bias = next(found), next(found)
        own = ctx.shards.summed(of_bias, x.shape[-2]).to(bias.dtype)
        of_parameters = (None if p is None else next(found) for p in parameters)
        return grad_x, own, None, None, None, None, *of_parameters


def attention_regathered(
    norm: LayerNorm,
    attention: Attention,
    x: Tensor,
    bias: Tensor,
    mask: Tensor,
    *,
    cut: int,
    dropout: Tensor | None,
    shards: AxialShards,
) -> Tensor:
    """``x + dropout * attention(norm(x))`` with a bias of which every rank has a shard.

    Args:
        norm: Layer norm of the branch.
        attention: Its attention.
        x: ``[*, R, N, c]``; attention is along N.
        bias: This rank's shard of ``[*, H, N, N]``.
        mask: ``[*, R, N]``, 0 for keys that must not be seen.
        cut: The dimension in which the bias is a shard, -2 or -1.
        dropout: Factors that broadcast against ``x``, or None.
        shards: The cut.
    """
    gate = attention.gate
    out: Tensor = _Attention.apply(
        *(x, bias, mask, dropout, attention.heads, _BiasShards(cut, shards), norm.weight, norm.bias),
        *(attention.query.weight, attention.key.weight, attention.value.weight),
        *((None, None) if gate is None else (gate.weight, gate.bias)),
        *(attention.output.weight, attention.output.bias),
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
