"""Triton kernel of :func:`fastfold.kernels.softmax`.

A program holds whole rows of keys. Programs that share a block of the bias run next to each other, so that the
bias comes from the cache.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.constants import MASKED_LOGIT
from fastfold.kernels.common.kernel_variant import TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import ROW_WIDTHS, innermost, padded, strides
from fastfold.kernels.common.triton_math import cast
from fastfold.kernels.common.tuning import launch_config, shipped

_MASKED_LOGIT = tl.constexpr(MASKED_LOGIT)
SIZES = ["rows", "heads", "queries", "keys", "chunk_rows"]


@triton.jit(do_not_specialize=SIZES)
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


def readable(mask: Tensor | None) -> Tensor | None:
    """A mask in a dtype that Triton compares with 0."""
    return None if mask is None else innermost(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)


def softmax_forward(out: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor | None) -> None:
    """Write the weights into the contiguous ``out [B, R, H, Nq, Nk]``; the other operands as in the definition."""
    if out.numel() == 0:
        return
    batch, rows, heads, queries, keys = scores.shape
    scores, mask = innermost(scores), readable(mask)
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


def specimens_of(direction: str, kernel: Any) -> list[Specimen]:
    """A kernel for every dtype, length class of a row and configuration."""
    found = []
    for dtype, width in itertools.product(TRITON_TYPES.values(), ROW_WIDTHS):
        for chip, config in shipped(f"softmax_{direction}", str(width)):
            integers = [n for n in kernel.arg_names if n.startswith("stride_")]
            signature = {n: f"*{dtype}" for n in kernel.arg_names if n.startswith("p_")}
            signature |= dict.fromkeys([*SIZES, "batch", *integers], "i32") | {"p_grad_bias": "*fp32"}
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


def specimens() -> list[Specimen]:
    """The kernel as it ships."""
    return specimens_of("forward", softmax_forward_kernel)
