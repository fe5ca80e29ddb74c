"""Triton kernel of :func:`fastfold.kernels.residual_update`: whole rows per program, every tensor passed once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import Rows, contiguous, padded, rows_of
from fastfold.kernels.common.triton_math import cast, row_offset
from fastfold.kernels.common.tuning import launch_config
from fastfold.kernels.ops.residual_update.operands import UpdateOperands

SIZES = ["count", "size_1", "size_2"]  #: Sizes that kernels are not specialised on


@triton.jit
def load_rows(p_x, o_row, o_channel, m_x, size_1, size_2, strides, AXES: tl.constexpr):
    """Load rows ``[BT, BC]`` of a tensor with any strides, in float32; zero outside of ``m_x``."""
    p_rows = (
        p_x
        + row_offset(o_row, size_1, size_2, strides, AXES)[:, None]
        + o_channel.to(tl.int64)[None, :] * strides[3]
    )
    return tl.load(p_rows, mask=m_x, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def residual_update_forward_kernel(
    p_x, p_residual, p_bias, p_gate, p_dropout, p_out, count, channels, size_1, size_2,
    x_strides, residual_strides, gate_strides, dropout_strides, out_strides,
    AXES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the update: a program owns BT rows, and reads all of them before it writes."""
    o_row = tl.program_id(0) * BT + tl.arange(0, BT)
    o_channel = tl.arange(0, BC)
    m_channel = o_channel < channels
    m_x = (o_row < count)[:, None] & m_channel[None, :]
    # [BT, BC]
    b_out = load_rows(p_x, o_row, o_channel, m_x, size_1, size_2, x_strides, AXES)
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    if HAS_GATE:
        b_out *= tl.sigmoid(load_rows(p_gate, o_row, o_channel, m_x, size_1, size_2, gate_strides, AXES))
    if HAS_DROPOUT:
        b_out *= load_rows(p_dropout, o_row, o_channel, m_x, size_1, size_2, dropout_strides, AXES)
    if HAS_RESIDUAL:
        b_out += load_rows(p_residual, o_row, o_channel, m_x, size_1, size_2, residual_strides, AXES)
    p_row = p_out + row_offset(o_row, size_1, size_2, out_strides, AXES)[:, None]
    p_row += o_channel.to(tl.int64)[None, :] * out_strides[3]
    tl.store(p_row, cast(b_out, p_out.dtype.element_ty), mask=m_x)


def strides_of(rows: Rows) -> list[tuple[int, int, int, int]]:
    """Return the strides of rows and channels of each tensor."""
    return [(*axes, x.stride(-1)) for x, axes in zip(rows.tensors, rows.strides, strict=True)]


def write_update(out: Tensor, operands: UpdateOperands) -> None:
    """Fill ``out [*, c]``, which may be ``x``, ``residual`` or ``gate``; ``dropout`` has the shape of ``x``."""
    x, residual, bias, gate, dropout = operands
    if x.numel() == 0:
        return
    channels = x.shape[-1]
    # x replaces missing operands: the kernel does not read them.
    inputs = [x if t is None else t for t in (x, residual, gate, dropout)]
    rows = rows_of(*inputs, out, channels_apart=tuple(range(5)))
    b_x, b_residual, b_gate, b_dropout, target = rows.tensors
    config = launch_config("residual_update_forward", str(padded(channels)), x.device)
    launch(residual_update_forward_kernel, (triton.cdiv(rows.count, config.blocks["BT"]),))(
        *(b_x, b_residual, contiguous(bias), b_gate, b_dropout, target),
        *(rows.count, channels, *rows.sizes, *strides_of(rows)),
        AXES=rows.axes,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_GATE=gate is not None,
        HAS_DROPOUT=dropout is not None,
        BC=padded(channels),
        **config.launch,
    )
    if target is not out:  # its axes could not be walked, so the kernel has filled a copy
        out.copy_(target)
