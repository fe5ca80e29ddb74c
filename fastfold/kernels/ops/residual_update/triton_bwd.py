"""Triton kernel of the gradients of :func:`fastfold.kernels.residual_update`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import contiguous, padded, rows_of
from fastfold.kernels.common.normalized_rows import PROGRAMS
from fastfold.kernels.common.triton_math import cast
from fastfold.kernels.common.tuning import launch_config
from fastfold.kernels.ops.residual_update.triton_fwd import SIZES, load_rows, strides_of


@triton.jit(do_not_specialize=SIZES)
def residual_update_backward_kernel(
    p_grad, p_x, p_bias, p_gate, p_dropout, p_grad_x, p_grad_bias, p_grad_gate, count, channels, size_1, size_2,
    grad_strides, x_strides, gate_strides, dropout_strides,
    AXES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    NEED_BIAS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute gradients of ``x`` and the gate, without gaps, and ``[programs, channels]`` partial sums for the bias."""
    o_channel = tl.arange(0, BC)
    m_channel = o_channel < channels
    b_grad_bias = tl.zeros([BT, BC], tl.float32)
    for i_block in range(tl.program_id(0), tl.cdiv(count, BT), tl.num_programs(0)):
        o_row = i_block * BT + tl.arange(0, BT)
        m_x = (o_row < count)[:, None] & m_channel[None, :]
        o_target = o_row.to(tl.int64)[:, None] * channels + o_channel[None, :]
        # [BT, BC]
        b_grad = load_rows(p_grad, o_row, o_channel, m_x, size_1, size_2, grad_strides, AXES)
        if HAS_DROPOUT:
            b_grad *= load_rows(p_dropout, o_row, o_channel, m_x, size_1, size_2, dropout_strides, AXES)
        if HAS_GATE:
            # [BT, BC]
            b_x = load_rows(p_x, o_row, o_channel, m_x, size_1, size_2, x_strides, AXES)
            if HAS_BIAS:
                b_x += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
            # [BT, BC]
            b_gate = tl.sigmoid(load_rows(p_gate, o_row, o_channel, m_x, size_1, size_2, gate_strides, AXES))
            b_grad *= b_gate
            b_grad_gate = b_grad * b_x * (1.0 - b_gate)
            tl.store(p_grad_gate + o_target, cast(b_grad_gate, p_grad_gate.dtype.element_ty), mask=m_x)
        if NEED_BIAS:
            b_grad_bias += b_grad
        tl.store(p_grad_x + o_target, cast(b_grad, p_grad_x.dtype.element_ty), mask=m_x)
    if NEED_BIAS:
        o_partial = tl.program_id(0) * channels + o_channel
        tl.store(p_grad_bias + o_partial, tl.sum(b_grad_bias, 0), mask=m_channel)


def update_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, gate: Tensor | None, dropout: Tensor | None, need_bias: bool
) -> list[Tensor | None]:
    """Return contiguous gradients of ``x``, the bias (in float32) and the gate; None for missing ones."""
    channels = x.shape[-1]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_gate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if x.numel() == 0:
        return [grad_x, x.new_zeros(channels, dtype=torch.float32) if need_bias else None, grad_gate]
    rows = rows_of(
        *(grad, x, x if gate is None else gate, x if dropout is None else dropout),
        channels_apart=tuple(range(4)),
    )
    config = launch_config("residual_update_backward", str(padded(channels)), x.device)
    programs = min(PROGRAMS, triton.cdiv(rows.count, config.blocks["BT"]))
    partial = x.new_empty(programs, channels, dtype=torch.float32) if need_bias else None
    b_grad, b_x, b_gate, b_dropout = rows.tensors
    launch(residual_update_backward_kernel, (programs,))(
        *(b_grad, b_x, contiguous(bias), b_gate, b_dropout, grad_x, partial, grad_gate),
        *(rows.count, channels, *rows.sizes, *strides_of(rows)),
        AXES=rows.axes,
        HAS_BIAS=bias is not None,
        HAS_GATE=gate is not None,
        HAS_DROPOUT=dropout is not None,
        NEED_BIAS=need_bias,
        BC=padded(channels),
        **config.launch,
    )
    return [grad_x, None if partial is None else partial.sum(0), grad_gate]
