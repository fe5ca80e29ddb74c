"""Triton kernel of the gradients of :func:`fastfold.kernels.softmax`.

A program walks over the rows R, so that the gradient of the bias is summed in a fixed order, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import innermost, padded, strides
from fastfold.kernels.common.triton_math import cast
from fastfold.kernels.common.tuning import launch_config
from fastfold.kernels.ops.softmax.triton_fwd import SIZES, query_block, readable, row_tile

PROGRAMS = 1024
"""Target number of programs, for which the rows R are split; equal on every GPU, so that results are too."""


@triton.jit(do_not_specialize=SIZES)
def softmax_backward_kernel(
    p_grad, p_out, p_mask, p_grad_scores, p_grad_bias,
    batch, rows, heads, queries, keys, chunk_rows, grad_strides, mask_strides,
    HAS_MASK: tl.constexpr, NEED_SCORES: tl.constexpr, NEED_BIAS: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute scores' gradients and the bias's partial sums; a program walks over a chunk of rows."""
    i_chunk = tl.program_id(0) % tl.cdiv(rows, chunk_rows)
    i_block = tl.program_id(0) // tl.cdiv(rows, chunk_rows)
    i_batch, i_head, o_query, o_key, m_key, m_tile = query_block(i_block, heads, queries, keys, BQ, BK)
    b_grad_bias = tl.zeros([BQ, BK], tl.float32)
    for i_step in range(i_chunk * chunk_rows, min((i_chunk + 1) * chunk_rows, rows)):
        i_row = tl.cast(i_step, tl.int64)
        # [BQ, BK]
        p_tile = row_tile(p_grad, grad_strides, i_batch, i_row, i_head, o_query, o_key)
        b_grad = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
        # [BQ, BK]
        o_out = ((i_batch * rows + i_row) * heads + i_head) * queries + o_query
        o_tile = o_out[:, None] * keys + o_key[None, :]
        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0).to(tl.float32)
        b_grad -= tl.sum(b_out * b_grad, 1)[:, None]
        # Rounded weights don't add up to 1; a second mean removes the remainder of the first.
        b_grad = b_out * (b_grad - tl.sum(b_out * b_grad, 1)[:, None])
        if HAS_MASK:
            # [BK]
            p_keys = p_mask + i_batch * mask_strides[0] + i_row * mask_strides[1] + o_key
            b_mask = tl.load(p_keys, mask=m_key, other=0)
            b_grad = tl.where((b_mask != 0)[None, :], b_grad, 0.0)
        if NEED_SCORES:
            tl.store(p_grad_scores + o_tile, cast(b_grad, p_grad_scores.dtype.element_ty), mask=m_tile)
        if NEED_BIAS:
            b_grad_bias += b_grad
    if NEED_BIAS:
        o_bias = ((i_chunk * batch + i_batch) * heads + i_head) * queries + o_query
        tl.store(p_grad_bias + o_bias[:, None] * keys + o_key[None, :], b_grad_bias, mask=m_tile)


def softmax_backward(
    grad: Tensor, out: Tensor, mask: Tensor | None, grad_scores: Tensor | None, need_bias: bool
) -> Tensor | None:
    """Write the gradient of the scores to ``grad_scores``, if given; return the bias's ``[B, H, Nq, Nk]``."""
    batch, rows, heads, queries, keys = out.shape
    if out.numel() == 0:
        return out.new_zeros(batch, heads, queries, keys, dtype=torch.float32) if need_bias else None
    grad, out, mask = innermost(grad), out.contiguous(), readable(mask)
    config = launch_config("softmax_backward", str(padded(keys)), out.device)
    programs = batch * heads * triton.cdiv(queries, config.blocks["BQ"])
    # Each chunk of rows writes a partial sum, so there are only as many chunks as fill a GPU.
    chunk_rows = triton.cdiv(rows, max(1, PROGRAMS // programs)) if need_bias else 1
    chunks = triton.cdiv(rows, chunk_rows)
    partial = out.new_empty(chunks, batch, heads, queries, keys, dtype=torch.float32) if need_bias else None
    launch(softmax_backward_kernel, (programs * chunks,))(
        *(grad, out, mask, grad_scores, partial, batch, rows, heads, queries, keys, chunk_rows),
        *(strides(grad, 4), strides(mask, 2)),
        HAS_MASK=mask is not None,
        NEED_SCORES=grad_scores is not None,
        NEED_BIAS=need_bias,
        BK=padded(keys),
        **config.launch,
    )
    return None if partial is None else partial.sum(0)
