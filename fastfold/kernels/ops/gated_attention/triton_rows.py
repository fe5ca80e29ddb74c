"""Norm, projections, attention and gate of short rows in one kernel, for a trial.

A program owns a head and takes every n-th row. It projects the row to queries, keys, values and gate logits in a slot
of memory of its own, and then attends within the slot. The next row overwrites the slot, so all slots stay in the L2
cache: of a row, device memory is read once and the attended values are written once. Projections are rounded as those
of the separate kernels.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import strides
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.common.triton_math import cast, dot
from fastfold.kernels.ops.attention.triton_fwd import (
    LOWEST,
    attend_keys,
    bias_of,
    hidden_of,
    mean_of_values,
    scaled,
)
from fastfold.kernels.ops.gated_attention.eager import EPS, RowBlock, Weights

VARIABLE = "FASTFOLD_ATTENTION_ROWS"
"""Environment variable: ``1`` to use this kernel where it serves; no GPU has timed it."""

WIDTHS = (128, 256)  #: Channels of pair and alignment
HEAD_CHANNELS = 32
MAX_LENGTH = 576  #: Positions of a row; slots of an H100's programs then take 39 MB of its L2 cache of 50 MB
CAPABILITIES = ((8, 0), (9, 0))  #: Compute capabilities that the kernel is built for
BM, BQ, BK, WARPS = 64, 64, 64, 4
_PROGRAMS = 2  #: Programs at a time on a multiprocessor: one projects while the other attends
_INTERPRETED_PROGRAMS = 2


def serves(x: Tensor, weights: Weights, heads: int) -> bool:
    """Return True if the kernel is requested and serves rows of ``x [R, N, c]``.

    It serves gated attention in bfloat16 with heads of 32 channels, 128 or 256 channels, and at most ``MAX_LENGTH``
    positions, on GPUs of :data:`CAPABILITIES` and in Triton's interpreter.
    """
    if os.environ.get(VARIABLE) != "1" or x.dtype != torch.bfloat16 or weights.bias is None:
        return False
    if len(weights.bias) != heads * HEAD_CHANNELS:
        return False
    if x.shape[-1] not in WIDTHS or x.stride(-1) != 1 or x.shape[-2] > MAX_LENGTH or 0 in x.shape:
        return False
    return interpreted() or (x.is_cuda and torch.cuda.get_device_capability(x.device) in CAPABILITIES)


def _programs_of_a_head(x: Tensor, heads: int) -> int:
    if not x.is_cuda:
        return _INTERPRETED_PROGRAMS
    return max(1, _PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count // heads)


@triton.jit
def project_row(
    p_x, p_slot, x_step, norm_weight, norm_bias, b_w, p_gate_bias, length, EPS,
    C: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Fill a slot ``[N, WIDTH]`` with ``LN(x) Wᵀ + b`` of a row ``x [N, C]``, from weights ``[WIDTH, C]``."""
    # Norm and bias are loaded for each block, because attention needs their registers in the meantime.
    o_c, o_w = tl.arange(0, C), tl.arange(0, WIDTH)
    m_gate = o_w >= WIDTH // 4 * 3
    b_scale, b_shift = tl.load(norm_weight + o_c), tl.load(norm_bias + o_c)
    for i_m in range(0, length, BM):
        o_m = i_m + tl.arange(0, BM)
        m_m = (o_m < length)[:, None]
        # [BM, C]
        b_x = tl.load(p_x + o_m.to(tl.int64)[:, None] * x_step + o_c[None, :], mask=m_m, other=0.0)
        b_exact = b_x.to(tl.float32)
        b_exact -= (tl.sum(b_exact, 1) / C)[:, None]
        b_rstd = tl.rsqrt(tl.sum(b_exact * b_exact, 1) / C + EPS)
        b_normed = cast(b_exact * b_rstd[:, None] * b_scale[None, :] + b_shift[None, :], b_x.dtype)
        b_bias = tl.load(p_gate_bias + o_w, mask=m_gate, other=0.0).to(tl.float32)
        # [BM, WIDTH]
        b_projected = dot(b_normed, tl.trans(b_w), "ieee") + b_bias[None, :]
        tl.store(p_slot + o_m[:, None] * WIDTH + o_w[None, :], cast(b_projected, b_x.dtype), mask=m_m)


@triton.jit(do_not_specialize=["heads", "rows", "length"])
def gated_attention_rows_kernel(
    x, norm_weight, norm_bias, weight, gate_bias, bias, hidden, slots, out, scale, EPS,
    heads, rows, length, x_strides, bias_strides, hidden_strides, out_strides,
    C: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Fill gated values ``out [R, N, H, D]`` from ``x [R, N, C]`` and weights ``[4 H D, C]``."""
    WIDTH: tl.constexpr = 4 * D  # queries, keys, values and gate logits of a head
    i_p = tl.program_id(0)
    i_h = i_p % heads
    o_c, o_d, o_w = tl.arange(0, C), tl.arange(0, D), tl.arange(0, WIDTH)
    o_k = tl.arange(0, BK).to(tl.int64)
    o_own = (o_w // D * heads + i_h) * D + o_w % D
    # [WIDTH, C]
    b_w = tl.load(weight + o_own[:, None] * C + o_c[None, :])
    p_gate_bias = gate_bias + (i_h - 3) * D  # by the slot's channel: gates follow queries, keys and values
    p_slot = slots + i_p.to(tl.int64) * length * WIDTH
    p_values = p_slot + 2 * D
    i_first = (i_p // heads).to(tl.int64)
    for i_k in range(0, rows - i_p // heads, tl.num_programs(0) // heads):
        i_r = i_first + i_k
        project_row(
            x + i_r * x_strides[0], p_slot, x_strides[1], norm_weight, norm_bias, b_w, p_gate_bias, length, EPS,
            C, WIDTH, BM,
        )  # fmt: skip
        tl.debug_barrier()  # other threads of the program have written the slot, too
        p_hidden = hidden_of(hidden, hidden_strides, 0, i_r, HAS_MASK)
        for i_q in range(0, length, BQ):
            o_q = i_q + tl.arange(0, BQ)
            m_q, m_d = o_q < length, o_d < D
            # [BQ, D]
            p_q = p_slot + o_q[:, None] * WIDTH + o_d[None, :]
            b_q = scaled(tl.load(p_q, mask=m_q[:, None], other=0.0), scale)
            p_bias = bias_of(
                bias, bias_strides, 0, i_h, o_q.to(tl.int64)[:, None] * bias_strides[2], HAS_BIAS
            )
            b_max, b_sum, b_out = attend_keys(
                b_q, p_slot + D, p_values, p_bias, p_hidden, WIDTH, WIDTH, length, o_k, o_d, m_q, m_d,
                BQ, D, BK, HAS_BIAS, HAS_MASK, "ieee",
            )  # fmt: skip
            if HAS_MASK:  # noqa: SIM102, this condition is decided at compile time
                if tl.max(b_max, 0) == LOWEST:
                    b_max, b_sum, b_out = mean_of_values(
                        b_sum, b_out, p_values, WIDTH, length, o_k, o_d, m_d, BQ, BK
                    )
            b_gate = tl.load(p_q + 3 * D, mask=m_q[:, None], other=0.0).to(tl.float32)
            b_out = b_out / b_sum[:, None] * tl.sigmoid(b_gate)
            p_out = (
                out + i_r * out_strides[0] + i_h * out_strides[2] + o_q.to(tl.int64)[:, None] * out_strides[1]
            )
            tl.store(p_out + o_d[None, :], cast(b_out, out.dtype.element_ty), mask=m_q[:, None])
        tl.debug_barrier()  # all threads have read the slot before the next row overwrites it


def attend_rows(rows: RowBlock, weights: Weights, heads: int, scratch: Scratch) -> Tensor:
    """Return gated values ``[R, N, H, D]`` of rows ``[R, N, c]`` that :func:`serves` is true for.

    Bias and mask are results of :func:`~.triton_launch.prepare`, and the weights those of :func:`~.eager.arrange`.
    """
    x, bias, hidden, *_ = rows
    count, length, channels = x.shape
    programs = min(count, _programs_of_a_head(x, heads)) * heads
    out = scratch("attended", count, length, heads, HEAD_CHANNELS)
    launch(gated_attention_rows_kernel, (programs,))(
        x,
        *weights.norm,
        weights.merged,
        weights.bias,
        *(x if operand is None else operand for operand in (bias, hidden)),
        scratch("slots", programs, length, 4 * HEAD_CHANNELS),
        out,
        *(HEAD_CHANNELS**-0.5, EPS, heads, count, length),
        *(x.stride()[:2], strides(bias, 3), strides(hidden, 2), out.stride()[:3]),
        C=channels,
        D=HEAD_CHANNELS,
        BM=BM,
        BQ=BQ,
        BK=BK,
        HAS_BIAS=bias is not None,
        HAS_MASK=hidden is not None,
        num_warps=WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return out
