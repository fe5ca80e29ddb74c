"""Triton kernels of :func:`fastfold.kernels.softmax`.

A program holds whole rows of keys. Programs that share a block of the bias run next to each other, so that the
bias comes from the cache. The backward pass walks over the rows R within a program and so sums the gradient of
the bias in a fixed order, without atomics.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.ahead_of_time import TRITON_TYPES, Specimen
from fastfold.kernels.layout import ROW_WIDTHS, innermost, padded, strides
from fastfold.kernels.softmax import MASKED_LOGIT
from fastfold.kernels.triton_arithmetic import cast
from fastfold.kernels.tuning import launch_config, shipped

PROGRAMS = 1024
"""Programs that the backward pass cuts the rows R for; the same on every GPU, as the results are."""

_MASKED_LOGIT = tl.constexpr(MASKED_LOGIT)
_SIZES = ["rows", "heads", "queries", "keys", "chunk_rows"]


@triton.jit(do_not_specialize=_SIZES)
def softmax_forward_kernel(
    p_scores,
    p_bias,
    p_mask,
    p_out,
    rows,
    heads,
    queries,
    keys,
    stride_sb,
    stride_sr,
    stride_sh,
    stride_sq,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_mb,
    stride_mr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    i_program = tl.program_id(0)
    i_row = (i_program % rows).to(tl.int64)
    i_block = i_program // rows
    i_query = i_block % tl.cdiv(queries, BQ)
    i_block = i_block // tl.cdiv(queries, BQ)
    i_head = (i_block % heads).to(tl.int64)
    i_batch = (i_block // heads).to(tl.int64)
    o_query = (i_query * BQ + tl.arange(0, BQ)).to(tl.int64)
    o_key = tl.arange(0, BK)
    m_key = o_key < keys
    m_tile = (o_query < queries)[:, None] & m_key[None, :]
    # [BQ, BK]
    p_tile = p_scores + i_batch * stride_sb + i_row * stride_sr + i_head * stride_sh
    p_tile = p_tile + o_query[:, None] * stride_sq + o_key[None, :]
    b_logits = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    if HAS_BIAS:
        # [BQ, BK]
        p_tile = p_bias + i_batch * stride_bb + i_head * stride_bh + o_query[:, None] * stride_bq
        b_logits += tl.load(p_tile + o_key[None, :], mask=m_tile, other=0.0).to(tl.float32)
    if HAS_MASK:
        # [BK]
        b_mask = tl.load(p_mask + i_batch * stride_mb + i_row * stride_mr + o_key, mask=m_key, other=0)
        b_logits = tl.where((b_mask != 0)[None, :], b_logits, _MASKED_LOGIT)
    b_logits = tl.where(m_key[None, :], b_logits, -float("inf"))
    b_weights = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
    b_weights = b_weights / tl.sum(b_weights, 1)[:, None]
    o_out = ((i_batch * rows + i_row) * heads + i_head) * queries + o_query
    p_tile = p_out + o_out[:, None] * keys + o_key[None, :]
    tl.store(p_tile, cast(b_weights, p_out.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=_SIZES)
def softmax_backward_kernel(
    p_grad,
    p_out,
    p_mask,
    p_grad_scores,
    p_grad_bias,
    batch,
    rows,
    heads,
    queries,
    keys,
    chunk_rows,
    stride_gb,
    stride_gr,
    stride_gh,
    stride_gq,
    stride_mb,
    stride_mr,
    HAS_MASK: tl.constexpr,
    NEED_SCORES: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    i_chunk = tl.program_id(0) % tl.cdiv(rows, chunk_rows)
    i_block = tl.program_id(0) // tl.cdiv(rows, chunk_rows)
    i_query = i_block % tl.cdiv(queries, BQ)
    i_block = i_block // tl.cdiv(queries, BQ)
    i_head = (i_block % heads).to(tl.int64)
    i_batch = (i_block // heads).to(tl.int64)
    o_query = (i_query * BQ + tl.arange(0, BQ)).to(tl.int64)
    o_key = tl.arange(0, BK)
    m_key = o_key < keys
    m_tile = (o_query < queries)[:, None] & m_key[None, :]
    b_grad_bias = tl.zeros([BQ, BK], tl.float32)
    for i_step in range(i_chunk * chunk_rows, min((i_chunk + 1) * chunk_rows, rows)):
        i_row = tl.cast(i_step, tl.int64)
        # [BQ, BK]
        p_tile = p_grad + i_batch * stride_gb + i_row * stride_gr + i_head * stride_gh
        p_tile = p_tile + o_query[:, None] * stride_gq + o_key[None, :]
        b_grad = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
        # [BQ, BK]
        o_out = ((i_batch * rows + i_row) * heads + i_head) * queries + o_query
        o_tile = o_out[:, None] * keys + o_key[None, :]
        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0).to(tl.float32)
        b_grad -= tl.sum(b_out * b_grad, 1)[:, None]
        # Rounded weights don't add up to 1; a second mean takes away what the first one left.
        b_grad = b_out * (b_grad - tl.sum(b_out * b_grad, 1)[:, None])
        if HAS_MASK:
            # [BK]
            b_mask = tl.load(p_mask + i_batch * stride_mb + i_row * stride_mr + o_key, mask=m_key, other=0)
            b_grad = tl.where((b_mask != 0)[None, :], b_grad, 0.0)
        if NEED_SCORES:
            tl.store(p_grad_scores + o_tile, cast(b_grad, p_grad_scores.dtype.element_ty), mask=m_tile)
        if NEED_BIAS:
            b_grad_bias += b_grad
    if NEED_BIAS:
        o_bias = ((i_chunk * batch + i_batch) * heads + i_head) * queries + o_query
        tl.store(p_grad_bias + o_bias[:, None] * keys + o_key[None, :], b_grad_bias, mask=m_tile)


def _readable(mask: Tensor | None) -> Tensor | None:
    """A mask in a dtype that Triton compares with 0."""
    return None if mask is None else innermost(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)


def softmax_forward(out: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor | None) -> None:
    """Write the weights into the contiguous ``out [B, R, H, Nq, Nk]``; the other operands as in the definition."""
    if out.numel() == 0:
        return
    batch, rows, heads, queries, keys = scores.shape
    scores, mask = innermost(scores), _readable(mask)
    bias = None if bias is None else innermost(bias)
    config = launch_config("softmax_forward", str(padded(keys)), scores.device)
    softmax_forward_kernel[(batch * rows * heads * triton.cdiv(queries, config.blocks["BQ"]),)](
        scores,
        bias,
        mask,
        out,
        rows,
        heads,
        queries,
        keys,
        *strides(scores, 4),
        *strides(bias, 3),
        *strides(mask, 2),
        HAS_BIAS=bias is not None,
        HAS_MASK=mask is not None,
        BK=padded(keys),
        **config.launch,
    )


def softmax_backward(
    grad: Tensor, out: Tensor, mask: Tensor | None, grad_scores: Tensor | None, need_bias: bool
) -> Tensor | None:
    """Write the gradient of the scores into the contiguous ``grad_scores`` if it is given.

    Returns:
        The gradient of the bias ``[B, H, Nq, Nk]`` in float32 if it is needed.
    """
    batch, rows, heads, queries, keys = out.shape
    if out.numel() == 0:
        return out.new_zeros(batch, heads, queries, keys, dtype=torch.float32) if need_bias else None
    grad, out, mask = innermost(grad), out.contiguous(), _readable(mask)
    config = launch_config("softmax_backward", str(padded(keys)), out.device)
    programs = batch * heads * triton.cdiv(queries, config.blocks["BQ"])
    # Each chunk of rows leaves a partial sum of its own behind: no more of them than fill a GPU.
    chunk_rows = triton.cdiv(rows, max(1, PROGRAMS // programs)) if need_bias else 1
    chunks = triton.cdiv(rows, chunk_rows)
    partial = out.new_empty(chunks, batch, heads, queries, keys, dtype=torch.float32) if need_bias else None
    softmax_backward_kernel[(programs * chunks,)](
        grad,
        out,
        mask,
        grad_scores,
        partial,
        batch,
        rows,
        heads,
        queries,
        keys,
        chunk_rows,
        *strides(grad, 4),
        *strides(mask, 2),
        HAS_MASK=mask is not None,
        NEED_SCORES=grad_scores is not None,
        NEED_BIAS=need_bias,
        BK=padded(keys),
        **config.launch,
    )
    return None if partial is None else partial.sum(0)


def specimens() -> list[Specimen]:
    """Both kernels for every dtype, length class of a row and configuration."""
    kernels = {"forward": softmax_forward_kernel, "backward": softmax_backward_kernel}
    found = []
    for dtype, width, (direction, kernel) in itertools.product(
        TRITON_TYPES.values(), ROW_WIDTHS, kernels.items()
    ):
        for chip, config in shipped(f"softmax_{direction}", str(width)):
            integers = [n for n in kernel.arg_names if n.startswith("stride_")]
            signature = {n: f"*{dtype}" for n in kernel.arg_names if n.startswith("p_")}
            signature |= dict.fromkeys([*_SIZES, "batch", *integers], "i32") | {"p_grad_bias": "*fp32"}
            switches = ("HAS_BIAS", "HAS_MASK", "NEED_SCORES", "NEED_BIAS")
            constants = dict.fromkeys(switches, True) | {"BK": width, **config.blocks}
            found.append(
                Specimen(
                    f"softmax_{direction} {dtype} keys={width} {chip}",
                    kernel,
                    {k: v for k, v in signature.items() if k in kernel.arg_names},
                    {k: v for k, v in constants.items() if k in kernel.arg_names},
                    config.num_warps,
                    config.num_stages,
                    aligned=integers,
                    chip=chip,
                )
            )
    return found
