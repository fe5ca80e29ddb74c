"""Triton kernel of :func:`fastfold.kernels.layer_norm`.

A program holds whole rows, so mean, variance and result need one reading of the tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import contiguous, padded, rows_of
from fastfold.kernels.common.triton_math import cast, row_offset
from fastfold.kernels.common.tuning import launch_config

SIZES = ["count", "size_1", "size_2"]  #: Sizes that kernels are not specialised on


@triton.jit
def statistics(b_x, m_channel, channels, eps):
    """Normalise rows ``b_x [BT, BC]`` (0 past the channels); also return reciprocal standard deviations ``[BT]``."""
    b_mean = tl.sum(b_x, 1) / channels
    b_centered = tl.where(m_channel[None, :], b_x - b_mean[:, None], 0.0)
    b_rstd = 1.0 / tl.sqrt_rn(tl.sum(b_centered * b_centered, 1) / channels + eps)
    return b_centered * b_rstd[:, None], b_rstd


@triton.jit
def statistics_backward(b_grad, b_normed, b_rstd, channels):
    """Compute the gradients ``[BT, BC]`` of rows from those of the normalised ones."""
    b_mean = tl.sum(b_grad, 1) / channels
    b_slope = tl.sum(b_grad * b_normed, 1) / channels
    return (b_grad - b_mean[:, None] - b_normed * b_slope[:, None]) * b_rstd[:, None]


@triton.jit(do_not_specialize=SIZES)
def layer_norm_forward_kernel(
    p_x, p_weight, p_bias, p_out, count, channels, size_1, size_2, x_strides, eps,
    AXES: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise, scale and shift rows: a program owns BT of them."""
    o_row = tl.program_id(0) * BT + tl.arange(0, BT)
    o_channel = tl.arange(0, BC)
    m_channel = o_channel < channels
    m_x = (o_row < count)[:, None] & m_channel[None, :]
    o_x = row_offset(o_row, size_1, size_2, x_strides, AXES)
    # [BT, BC]
    b_x = tl.load(p_x + o_x[:, None] + o_channel[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_out, _ = statistics(b_x, m_channel, channels, eps)
    if HAS_WEIGHT:
        # [BC]
        b_out *= tl.load(p_weight + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        # [BC]
        b_out += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    p_row = p_out + o_row.to(tl.int64)[:, None] * channels + o_channel[None, :]
    tl.store(p_row, cast(b_out, p_out.dtype.element_ty), mask=m_x)


def layer_norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the contiguous normalisation of ``x [*, c]``, c at most 4,096."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    rows = rows_of(x)
    config = launch_config("layer_norm_forward", str(padded(x.shape[-1])), x.device)
    launch(layer_norm_forward_kernel, (triton.cdiv(rows.count, config.blocks["BT"]),))(
        *(rows.tensors[0], contiguous(weight), contiguous(bias), out),
        *(rows.count, x.shape[-1], *rows.sizes, rows.strides[0], eps),
        AXES=rows.axes,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BC=padded(x.shape[-1]),
        **config.launch,
    )
    return out
