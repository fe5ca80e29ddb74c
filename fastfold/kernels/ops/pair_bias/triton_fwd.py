"""Triton kernel of :func:`fastfold.kernels.pair_bias`.

The normalised pair tensor exists in registers only, so that the pair tensor is read once.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded, rows_of
from fastfold.kernels.common.normalized_rows import configuration
from fastfold.kernels.common.triton_math import cast, dot, precision, row_offset
from fastfold.kernels.ops.layer_norm.triton_fwd import statistics
from fastfold.kernels.ops.pair_bias.params import PairBiasParams


@triton.jit(do_not_specialize=["columns", "size_1", "size_2"])
def pair_bias_forward_kernel(
    p_z, p_norm_weight, p_norm_bias, p_weight, p_out,
    count, columns, channels, heads, size_1, size_2, z_strides, out_strides, head_stride, eps,
    AXES: tl.constexpr, IN_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Normalise positions and project them to heads: a program owns BT positions."""
    # IN_ORDER: positions of a head follow each other in ``out``, so that a thread stores several at once. Along two
    # axes the positions include the ends of rows past the pair's columns.
    o_row = tl.program_id(0) * BT + tl.arange(0, BT)
    o_channel = tl.arange(0, BC)
    o_head = tl.arange(0, BH)
    m_row = o_row < count
    m_channel = o_channel < channels
    m_head = o_head < heads
    o_z = row_offset(o_row, size_1, size_2, z_strides, AXES)
    # [BT, BC]
    m_z = m_row[:, None] & m_channel[None, :]
    if IN_ORDER and AXES == 2:
        m_z = m_z & (o_row % size_2 < columns)[:, None]
    b_z = tl.load(p_z + o_z[:, None] + o_channel[None, :], mask=m_z, other=0.0).to(tl.float32)
    # [BC]
    b_norm_weight = tl.load(p_norm_weight + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    # [BC]
    b_norm_bias = tl.load(p_norm_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    b_normed, _ = statistics(b_z, m_channel, channels, eps)
    b_normed = b_normed * b_norm_weight[None, :] + b_norm_bias[None, :]
    # [BC, BH]
    p_columns = p_weight + o_head[None, :] * channels + o_channel[:, None]
    b_weight = tl.load(p_columns, mask=m_head[None, :] & m_channel[:, None], other=0.0)
    b_out = dot(cast(b_normed, b_weight.dtype), b_weight, PRECISION)
    o_out = o_row.to(tl.int64) if IN_ORDER else row_offset(o_row, size_1, size_2, out_strides, AXES)
    p_columns = p_out + o_out[:, None] + o_head.to(tl.int64)[None, :] * head_stride
    tl.store(p_columns, cast(b_out, p_out.dtype.element_ty), mask=m_row[:, None] & m_head[None, :])


def pair_bias_forward(z: Tensor, parameters: PairBiasParams, eps: float, *, multiple: int = 1) -> Tensor:
    """Return the bias ``[*, H, A, B]`` of ``z [*, A, B, c]``.

    The weight ``[H, c]`` has the dtype of ``z``. Without leading axes, the distance of the bias's rows is a multiple of
    ``multiple`` elements.
    """
    heads, channels = parameters.weight.shape
    *batch, length, columns, _ = z.shape
    width = columns if batch else -(-columns // multiple) * multiple
    out = z.new_empty(*batch, heads, length, width)
    if width > columns:
        out = out[..., :columns]
    if z.numel() == 0:
        return out
    in_order = math.prod(batch) == 1
    rows = rows_of(z, out.movedim(-3, -1), channels_apart=(1,))
    sizes, count = rows.sizes, rows.count
    if in_order and rows.axes == 2:
        sizes, count = (length, width), length * width
    config = configuration("pair_bias_forward", z, channels)
    launch(pair_bias_forward_kernel, (triton.cdiv(count, config.blocks["BT"]),))(
        *(rows.tensors[0], *(x.contiguous() for x in parameters), out),
        *(count, columns, channels, heads, *sizes, *rows.strides, out.stride(-3), eps),
        AXES=rows.axes,
        IN_ORDER=in_order,
        PRECISION=precision(z, config),
        BC=padded(channels),
        BH=padded(heads),
        **config.launch,
    )
    return out
