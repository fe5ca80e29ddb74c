"""Triton kernel of the gradients of :func:`fastfold.kernels.pair_bias`: one reading of the pair tensor, one writing.

The parameters' gradients follow from two sums over the positions t, of the gradient g [t, H] and the normalised input
x̂ [t, c] before its scale w and shift b: M = gᵀ x̂ and s = Σ g. Then

    dW = M w + s b,   dw = Σ_h W M,   db = Σ_h W s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded, rows_of
from fastfold.kernels.common.normalized_rows import configuration
from fastfold.kernels.common.triton_math import cast, dot, precision, row_offset
from fastfold.kernels.ops.layer_norm.triton_fwd import statistics, statistics_backward
from fastfold.kernels.ops.pair_bias.params import PairBiasParams

PROGRAMS = 512
"""Maximum number of programs, so of terms of the second sum; equal on every GPU, so that results are too."""


@triton.jit(do_not_specialize=["count", "size_1", "size_2", "head_stride"])
def pair_bias_backward_kernel(
    p_grad, p_z, p_norm_weight, p_weight, p_grad_z, p_product, p_sum,
    count, channels, heads, size_1, size_2, grad_strides, z_strides, head_stride, eps,
    AXES: tl.constexpr, PRECISION: tl.constexpr, NEED_Z: tl.constexpr, NEED_PARAMETERS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Compute gradients of ``z``; write partial sums of M and s for the parameters."""
    i_program = tl.program_id(0)
    o_channel = tl.arange(0, BC)
    o_head = tl.arange(0, BH)
    m_channel = o_channel < channels
    m_head = o_head < heads
    m_weight = m_head[:, None] & m_channel[None, :]
    # [BC]
    b_norm_weight = tl.load(p_norm_weight + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    # [BH, BC]
    b_weight = tl.load(p_weight + o_head[:, None] * channels + o_channel[None, :], mask=m_weight, other=0.0)
    b_product = tl.zeros([BH, BC], tl.float32)
    b_sum = tl.zeros([BH], tl.float32)
    for i_block in range(i_program, tl.cdiv(count, BT), tl.num_programs(0)):
        o_row = i_block * BT + tl.arange(0, BT)
        m_row = o_row < count
        m_z = m_row[:, None] & m_channel[None, :]
        o_z = row_offset(o_row, size_1, size_2, z_strides, AXES)
        o_grad = row_offset(o_row, size_1, size_2, grad_strides, AXES)
        # [BT, BC]
        b_z = tl.load(p_z + o_z[:, None] + o_channel[None, :], mask=m_z, other=0.0).to(tl.float32)
        # [BT, BH]
        p_columns = p_grad + o_grad[:, None] + o_head.to(tl.int64)[None, :] * head_stride
        b_grad = tl.load(p_columns, mask=m_row[:, None] & m_head[None, :], other=0.0)
        b_normed, b_rstd = statistics(b_z, m_channel, channels, eps)
        if NEED_PARAMETERS:
            b_product += dot(tl.trans(b_grad), cast(b_normed, b_weight.dtype), PRECISION)
            b_sum += tl.sum(b_grad.to(tl.float32), 0)
        if NEED_Z:
            b_grad_z = dot(b_grad, b_weight, PRECISION) * b_norm_weight[None, :]
            b_grad_z = statistics_backward(b_grad_z, b_normed, b_rstd, channels)
            p_row = p_grad_z + o_row.to(tl.int64)[:, None] * channels + o_channel[None, :]
            tl.store(p_row, cast(b_grad_z, p_grad_z.dtype.element_ty), mask=m_z)
    if NEED_PARAMETERS:
        p_rows = p_product + (i_program * heads + o_head)[:, None] * channels + o_channel[None, :]
        tl.store(p_rows, b_product, mask=m_weight)
        tl.store(p_sum + i_program * heads + o_head, b_sum, mask=m_head)


def pair_bias_backward(
    grad: Tensor, z: Tensor, parameters: PairBiasParams, eps: float, *, need_z: bool, need_parameters: bool
) -> list[Tensor | None]:
    """Return gradients of ``z``, and of the three parameters in float32; None for those not requested."""
    norm_weight, norm_bias, weight = parameters
    heads, channels = weight.shape
    rows = rows_of(grad.movedim(-3, -1), z, channels_apart=(0,))
    config = configuration("pair_bias_backward", z, channels)
    programs = min(PROGRAMS, triton.cdiv(rows.count, config.blocks["BT"]))
    grad_z = torch.empty(z.shape, dtype=z.dtype, device=z.device) if need_z else None
    product = z.new_empty(programs, heads, channels, dtype=torch.float32) if need_parameters else None
    total = z.new_empty(programs, heads, dtype=torch.float32) if need_parameters else None
    if rows.count > 0:
        launch(pair_bias_backward_kernel, (programs,))(
            *(*rows.tensors, norm_weight.contiguous(), weight.contiguous(), grad_z, product, total),
            *(rows.count, channels, heads, *rows.sizes, *rows.strides, rows.tensors[0].stride(-1), eps),
            AXES=rows.axes,
            PRECISION=precision(z, config),
            NEED_Z=need_z,
            NEED_PARAMETERS=need_parameters,
            BC=padded(channels),
            BH=padded(heads),
            **config.launch,
        )
    if product is None or total is None:
        return [grad_z, None, None, None]
    product, sums, weight = product.sum(0), total.sum(0), weight.float()
    grad_weight = torch.addr(product * norm_weight.float(), sums, norm_bias.float())
    return [grad_z, (weight * product).sum(0), torch.mv(weight.t(), sums), grad_weight]
