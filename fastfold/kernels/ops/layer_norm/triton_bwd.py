"""Triton kernel of the gradients of :func:`fastfold.kernels.layer_norm`.

It recomputes the statistics from the input, which it must read anyway, and sums the parameters' gradients in a fixed
order: each program over its own rows, then one reduction over the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import contiguous, padded, rows_of
from fastfold.kernels.common.normalized_rows import PROGRAMS
from fastfold.kernels.common.triton_math import cast, row_offset
from fastfold.kernels.common.tuning import launch_config
from fastfold.kernels.ops.layer_norm.triton_fwd import SIZES, statistics, statistics_backward


@triton.jit(do_not_specialize=SIZES)
def layer_norm_backward_kernel(
    p_grad, p_x, p_weight, p_grad_x, p_grad_weight, p_grad_bias,
    count, channels, size_1, size_2, grad_strides, x_strides, eps,
    AXES: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute gradients of rows; write ``[programs, channels]`` partial sums for weight and bias."""
    i_program = tl.program_id(0)
    o_channel = tl.arange(0, BC)
    m_channel = o_channel < channels
    b_grad_weight = tl.zeros([BT, BC], tl.float32)
    b_grad_bias = tl.zeros([BT, BC], tl.float32)
    if HAS_WEIGHT:
        # [BC]
        b_weight = tl.load(p_weight + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    for i_block in range(i_program, tl.cdiv(count, BT), tl.num_programs(0)):
        o_row = i_block * BT + tl.arange(0, BT)
        m_x = (o_row < count)[:, None] & m_channel[None, :]
        o_x = row_offset(o_row, size_1, size_2, x_strides, AXES)
        o_grad = row_offset(o_row, size_1, size_2, grad_strides, AXES)
        # [BT, BC]
        b_x = tl.load(p_x + o_x[:, None] + o_channel[None, :], mask=m_x, other=0.0).to(tl.float32)
        # [BT, BC]
        b_grad = tl.load(p_grad + o_grad[:, None] + o_channel[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_normed, b_rstd = statistics(b_x, m_channel, channels, eps)
        if NEED_WEIGHT:
            b_grad_weight += b_grad * b_normed
        if NEED_BIAS:
            b_grad_bias += b_grad
        if NEED_X:
            if HAS_WEIGHT:
                b_grad *= b_weight[None, :]
            b_grad_x = statistics_backward(b_grad, b_normed, b_rstd, channels)
            p_row = p_grad_x + o_row.to(tl.int64)[:, None] * channels + o_channel[None, :]
            tl.store(p_row, cast(b_grad_x, p_grad_x.dtype.element_ty), mask=m_x)
    o_partial = i_program * channels + o_channel
    if NEED_WEIGHT:
        tl.store(p_grad_weight + o_partial, tl.sum(b_grad_weight, 0), mask=m_channel)
    if NEED_BIAS:
        tl.store(p_grad_bias + o_partial, tl.sum(b_grad_bias, 0), mask=m_channel)


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    need_x: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of ``x [*, c]``, and in float32 of weight and bias ``[c]``; None for those not needed."""
    channels = x.shape[-1]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    if x.numel() == 0:
        totals = [x.new_zeros(channels, dtype=torch.float32) if n else None for n in (need_weight, need_bias)]
        return grad_x, totals[0], totals[1]
    rows = rows_of(grad, x)
    config = launch_config("layer_norm_backward", str(padded(channels)), x.device)
    programs = min(PROGRAMS, triton.cdiv(rows.count, config.blocks["BT"]))
    partial_weight, partial_bias = (
        x.new_empty(programs, channels, dtype=torch.float32) if need else None
        for need in (need_weight, need_bias)
    )
    launch(layer_norm_backward_kernel, (programs,))(
        *(*rows.tensors, contiguous(weight), grad_x, partial_weight, partial_bias),
        *(rows.count, channels, *rows.sizes, *rows.strides, eps),
        AXES=rows.axes,
        HAS_WEIGHT=weight is not None,
        NEED_X=need_x,
        NEED_WEIGHT=need_weight,
        NEED_BIAS=need_bias,
        BC=padded(channels),
        **config.launch,
    )
    grad_weight, grad_bias = (None if p is None else p.sum(0) for p in (partial_weight, partial_bias))
    return grad_x, grad_weight, grad_bias
