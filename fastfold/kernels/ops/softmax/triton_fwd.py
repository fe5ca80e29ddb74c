"""Triton kernel of :func:`fastfold.kernels.softmax`.

A program holds whole rows of keys. Programs that share a block of the bias run consecutively, so that they find it in
the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import MASKED_LOGIT, innermost, padded, strides
from fastfold.kernels.common.triton_math import cast
from fastfold.kernels.common.tuning import launch_config

_MASKED_LOGIT = tl.constexpr(MASKED_LOGIT)
SIZES = ["rows", "heads", "queries", "keys", "chunk_rows"]


@triton.jit
def query_block(i_block, heads, queries, keys, BQ: tl.constexpr, BK: tl.constexpr):
    """Return a block's batch element, head, queries and keys, and masks of keys and of both."""
    i_query = i_block % tl.cdiv(queries, BQ)
    i_block = i_block // tl.cdiv(queries, BQ)
    i_head = (i_block % heads).to(tl.int64)
    i_batch = (i_block // heads).to(tl.int64)
    o_query = (i_query * BQ + tl.arange(0, BQ)).to(tl.int64)
    o_key = tl.arange(0, BK)
    m_key = o_key < keys
    return i_batch, i_head, o_query, o_key, m_key, (o_query < queries)[:, None] & m_key[None, :]


@triton.jit
def row_tile(p_x, strides, i_batch, i_row, i_head, o_query, o_key):
    """Return pointers ``[BQ, BK]`` to the keys of a row and head of ``x [B, R, H, Nq, Nk]``."""
    p_tile = p_x + i_batch * strides[0] + i_row * strides[1] + i_head * strides[2]
    return p_tile + o_query[:, None] * strides[3] + o_key[None, :]


@triton.jit(do_not_specialize=SIZES)
def softmax_forward_kernel(
    p_scores, p_bias, p_mask, p_out, rows, heads, queries, keys, scores_strides, bias_strides, mask_strides,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute weights: a program owns BQ queries of one row and head, with all keys."""
    i_program = tl.program_id(0)
    i_row = (i_program % rows).to(tl.int64)
    i_block = i_program // rows
    i_batch, i_head, o_query, o_key, m_key, m_tile = query_block(i_block, heads, queries, keys, BQ, BK)
    # [BQ, BK]
    p_tile = row_tile(p_scores, scores_strides, i_batch, i_row, i_head, o_query, o_key)
    b_logits = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    if HAS_BIAS:
        # [BQ, BK]
        p_tile = p_bias + i_batch * bias_strides[0] + i_head * bias_strides[1]
        p_tile += o_query[:, None] * bias_strides[2]
        b_logits += tl.load(p_tile + o_key[None, :], mask=m_tile, other=0.0).to(tl.float32)
    if HAS_MASK:
        # [BK]
        p_keys = p_mask + i_batch * mask_strides[0] + i_row * mask_strides[1] + o_key
        b_mask = tl.load(p_keys, mask=m_key, other=0)
        b_logits = tl.where((b_mask != 0)[None, :], b_logits, _MASKED_LOGIT)
    b_logits = tl.where(m_key[None, :], b_logits, -float("inf"))
    b_weights = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
    b_weights = b_weights / tl.sum(b_weights, 1)[:, None]
    o_out = ((i_batch * rows + i_row) * heads + i_head) * queries + o_query
    p_tile = p_out + o_out[:, None] * keys + o_key[None, :]
    tl.store(p_tile, cast(b_weights, p_out.dtype.element_ty), mask=m_tile)


def readable(mask: Tensor | None) -> Tensor | None:
    """Return the mask in a dtype that Triton compares with 0."""
    return None if mask is None else innermost(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)


def softmax_forward(out: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor | None) -> None:
    """Write the weights to the contiguous ``out [B, R, H, Nq, Nk]``; other operands as in the definition."""
    if out.numel() == 0:
        return
    batch, rows, heads, queries, keys = scores.shape
    scores, mask = innermost(scores), readable(mask)
    bias = None if bias is None else innermost(bias)
    config = launch_config("softmax_forward", str(padded(keys)), scores.device)
    launch(softmax_forward_kernel, (batch * rows * heads * triton.cdiv(queries, config.blocks["BQ"]),))(
        *(scores, bias, mask, out, rows, heads, queries, keys),
        *(strides(scores, 4), strides(bias, 3), strides(mask, 2)),
        HAS_BIAS=bias is not None,
        HAS_MASK=mask is not None,
        BK=padded(keys),
        **config.launch,
    )
