"""Softmax of FastFold's first release, written for Triton: a rival of attention that keeps its scores in memory.

It adds pair bias and key mask in the pass that computes the weights. A program holds whole rows of keys. Programs that
share a block of the bias run consecutively, so that they find it in the cache. The backward pass walks over the rows,
so that the gradient of the bias is summed in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.layout import MASKED_LOGIT, innermost, padded, strides
from fastfold.kernels.common.triton_math import cast

_MASKED_LOGIT = tl.constexpr(MASKED_LOGIT)
_SIZES = ["rows", "heads", "queries", "keys", "chunk_rows"]
_TILE = 1024  #: Elements of a program's block of scores, unless a row of keys has more
_WARPS = 4
_PROGRAMS = 1024  #: Target number of programs of the backward pass


@triton.jit
def _query_block(i_block, heads, queries, keys, BQ: tl.constexpr, BK: tl.constexpr):
    """Return a block's head, queries and keys, and masks of keys and of both."""
    i_head = (i_block // tl.cdiv(queries, BQ)).to(tl.int64)
    o_query = ((i_block % tl.cdiv(queries, BQ)) * BQ + tl.arange(0, BQ)).to(tl.int64)
    o_key = tl.arange(0, BK)
    m_key = o_key < keys
    return i_head, o_query, o_key, m_key, (o_query < queries)[:, None] & m_key[None, :]


@triton.jit
def _row_tile(p_x, strides, i_row, i_head, o_query, o_key):
    """Return pointers ``[BQ, BK]`` to the keys of a row and head of ``x [R, H, Nq, Nk]``."""
    return p_x + i_row * strides[0] + i_head * strides[1] + o_query[:, None] * strides[2] + o_key[None, :]


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    p_scores, p_bias, p_mask, p_out, rows, heads, queries, keys, scores_strides, bias_strides, mask_strides,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute weights: a program owns BQ queries of one row and head, with all keys."""
    i_row = (tl.program_id(0) % rows).to(tl.int64)
    i_head, o_query, o_key, m_key, m_tile = _query_block(
        tl.program_id(0) // rows, heads, queries, keys, BQ, BK
    )
    # [BQ, BK]
    p_tile = _row_tile(p_scores, scores_strides, i_row, i_head, o_query, o_key)
    b_logits = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    # [BQ, BK]
    p_tile = p_bias + i_head * bias_strides[0] + o_query[:, None] * bias_strides[1] + o_key[None, :]
    b_logits += tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    # [BK]
    b_mask = tl.load(p_mask + i_row * mask_strides[0] + o_key, mask=m_key, other=0)
    b_logits = tl.where((b_mask != 0)[None, :], b_logits, _MASKED_LOGIT)
    b_logits = tl.where(m_key[None, :], b_logits, -float("inf"))
    b_weights = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
    b_weights = b_weights / tl.sum(b_weights, 1)[:, None]
    p_tile = p_out + ((i_row * heads + i_head) * queries + o_query)[:, None] * keys + o_key[None, :]
    tl.store(p_tile, cast(b_weights, p_out.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=_SIZES)
def _backward_kernel(
    p_grad, p_out, p_mask, p_grad_scores, p_grad_bias,
    rows, heads, queries, keys, chunk_rows, grad_strides, mask_strides,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute scores' gradients and the bias's partial sums; a program walks over a chunk of rows."""
    i_chunk = tl.program_id(0) % tl.cdiv(rows, chunk_rows)
    i_block = tl.program_id(0) // tl.cdiv(rows, chunk_rows)
    i_head, o_query, o_key, m_key, m_tile = _query_block(i_block, heads, queries, keys, BQ, BK)
    b_grad_bias = tl.zeros([BQ, BK], tl.float32)
    for i_step in range(i_chunk * chunk_rows, min((i_chunk + 1) * chunk_rows, rows)):
        i_row = tl.cast(i_step, tl.int64)
        # [BQ, BK]
        p_tile = _row_tile(p_grad, grad_strides, i_row, i_head, o_query, o_key)
        b_grad = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
        # [BQ, BK]
        o_tile = ((i_row * heads + i_head) * queries + o_query)[:, None] * keys + o_key[None, :]
        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0).to(tl.float32)
        b_grad -= tl.sum(b_out * b_grad, 1)[:, None]
        # Rounded weights don't add up to 1; a second mean removes the remainder of the first.
        b_grad = b_out * (b_grad - tl.sum(b_out * b_grad, 1)[:, None])
        # [BK]
        b_mask = tl.load(p_mask + i_row * mask_strides[0] + o_key, mask=m_key, other=0)
        b_grad = tl.where((b_mask != 0)[None, :], b_grad, 0.0)
        tl.store(p_grad_scores + o_tile, cast(b_grad, p_grad_scores.dtype.element_ty), mask=m_tile)
        b_grad_bias += b_grad
    o_bias = (i_chunk * heads + i_head) * queries + o_query
    tl.store(p_grad_bias + o_bias[:, None] * keys + o_key[None, :], b_grad_bias, mask=m_tile)


def _query_rows(keys: int) -> int:
    return max(1, _TILE // padded(keys))


class _FusedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        rows, heads, queries, keys = scores.shape
        scores, bias, mask = innermost(scores), innermost(bias), innermost(mask)
        out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
        block = _query_rows(keys)
        _forward_kernel[(rows * heads * triton.cdiv(queries, block),)](
            *(scores, bias, mask, out, rows, heads, queries, keys),
            *(strides(scores, 3), strides(bias, 2), strides(mask, 1)),
            BQ=block,
            BK=padded(keys),
            num_warps=_WARPS,
        )
        ctx.save_for_backward(out, mask)
        ctx.bias_dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        out, mask = ctx.saved_tensors
        rows, heads, queries, keys = out.shape
        grad, grad_scores, block = innermost(grads[0]), torch.empty_like(out), _query_rows(keys)
        programs = heads * triton.cdiv(queries, block)
        # Each chunk of rows writes a partial sum, so there are only as many chunks as fill a GPU.
        chunk_rows = triton.cdiv(rows, max(1, _PROGRAMS // programs))
        chunks = triton.cdiv(rows, chunk_rows)
        partial = out.new_empty(chunks, heads, queries, keys, dtype=torch.float32)
        _backward_kernel[(programs * chunks,)](
            *(grad, out, mask, grad_scores, partial, rows, heads, queries, keys, chunk_rows),
            *(strides(grad, 3), strides(mask, 1)),
            BQ=block,
            BK=padded(keys),
            num_warps=_WARPS,
        )
        return grad_scores, partial.sum(0).to(ctx.bias_dtype), None


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Compute :func:`fastfold.kernels.attention` without batch axes or gate, with all scores in memory."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    weights: Tensor = _FusedSoftmax.apply(q @ k.mT * q.shape[-1] ** -0.5, bias, mask)
    return (weights @ v).transpose(-3, -2)
