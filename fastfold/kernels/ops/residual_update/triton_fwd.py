"""Triton kernel of :func:`fastfold.kernels.residual_update`: whole rows per program, every tensor passed once."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import ROW_WIDTHS, Rows, padded, rows_of
from fastfold.kernels.common.triton_math import cast, row_offset
from fastfold.kernels.common.tuning import launch_config, shipped

SIZES = ["count", "size_1", "size_2"]
"""Sizes that no kernel is specialised on."""


@triton.jit
def load_rows(
    p_x, o_row, o_channel, m_x, size_1, size_2, stride_0, stride_1, stride_2, stride_c, AXES: tl.constexpr
):
    """Rows ``[BT, BC]`` of a tensor with any strides, in float32; zero where ``m_x`` is not."""
    o_x = row_offset(o_row, size_1, size_2, stride_0, stride_1, stride_2, AXES)
    p_rows = p_x + o_x[:, None] + o_channel.to(tl.int64)[None, :] * stride_c
    return tl.load(p_rows, mask=m_x, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def residual_update_forward_kernel(
    p_x,
    p_residual,
    p_bias,
    p_gate,
    p_dropout,
    p_out,
    count,
    channels,
    size_1,
    size_2,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xc,
    stride_r0,
    stride_r1,
    stride_r2,
    stride_rc,
    stride_g0,
    stride_g1,
    stride_g2,
    stride_gc,
    stride_d0,
    stride_d1,
    stride_d2,
    stride_dc,
    stride_o0,
    stride_o1,
    stride_o2,
    stride_oc,
    AXES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """A program owns BT rows, and has read all of them before it writes."""
    o_row = tl.program_id(0) * BT + tl.arange(0, BT)
    o_channel = tl.arange(0, BC)
    m_channel = o_channel < channels
    m_x = (o_row < count)[:, None] & m_channel[None, :]
    # [BT, BC]
    b_out = load_rows(
        p_x, o_row, o_channel, m_x, size_1, size_2, stride_x0, stride_x1, stride_x2, stride_xc, AXES
    )
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    if HAS_GATE:
        # [BT, BC]
        b_gate = load_rows(
            p_gate, o_row, o_channel, m_x, size_1, size_2, stride_g0, stride_g1, stride_g2, stride_gc, AXES
        )
        b_out *= tl.sigmoid(b_gate)
    if HAS_DROPOUT:
        b_out *= load_rows(
            p_dropout, o_row, o_channel, m_x, size_1, size_2, stride_d0, stride_d1, stride_d2, stride_dc, AXES
        )
    if HAS_RESIDUAL:
        b_out += load_rows(
            p_residual,
            o_row,
            o_channel,
            m_x,
            size_1,
            size_2,
            stride_r0,
            stride_r1,
            stride_r2,
            stride_rc,
            AXES,
        )
    o_out = row_offset(o_row, size_1, size_2, stride_o0, stride_o1, stride_o2, AXES)
    p_row = p_out + o_out[:, None] + o_channel.to(tl.int64)[None, :] * stride_oc
    tl.store(p_row, cast(b_out, p_out.dtype.element_ty), mask=m_x)


def strides_of(rows: Rows) -> list[int]:
    """Strides of rows and channels, four for each tensor."""
    return [
        stride
        for tensor, axes in zip(rows.tensors, rows.strides, strict=True)
        for stride in (*axes, tensor.stride(-1))
    ]


def write_update(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
) -> None:
    """Fill ``out [*, c]``, which may be ``x``, ``residual`` or ``gate``; ``dropout`` has the shape of ``x``."""
    if x.numel() == 0:
        return
    channels = x.shape[-1]
    # What is missing is replaced by x, which costs nothing: it is not read.
    given = [x if t is None else t for t in (x, residual, gate, dropout)]
    rows = rows_of(*given, out, channels_apart=tuple(range(5)))
    read, target = rows.tensors[:4], rows.tensors[4]
    config = launch_config("residual_update_forward", str(padded(channels)), x.device)
    with torch.cuda.device_of(x):
        residual_update_forward_kernel[(triton.cdiv(rows.count, config.blocks["BT"]),)](
            *(read[0], read[1], None if bias is None else bias.contiguous(), read[2], read[3], target),
            *(rows.count, channels, *rows.sizes),
            *strides_of(rows),
            AXES=rows.axes,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            HAS_GATE=gate is not None,
            HAS_DROPOUT=dropout is not None,
            BC=padded(channels),
            **config.launch,
        )
    if target is not out:  # its axes could not be walked over: the kernel has filled a copy
        out.copy_(target)


def specimens_of_rows(name: str, kernel: Any) -> list[Specimen]:
    """A kernel of this operator for every dtype, width of a row and configuration."""
    strides = [n for n in kernel.arg_names if n.startswith("stride_")]
    switches = ("HAS_RESIDUAL", "HAS_BIAS", "HAS_GATE", "HAS_DROPOUT", "NEED_BIAS")
    found = []
    for dtype, width in itertools.product(TRITON_TYPES.values(), ROW_WIDTHS):
        signature = {n: f"*{dtype}" for n in kernel.arg_names if n.startswith("p_")}
        signature |= dict.fromkeys([*SIZES, "channels", *strides], "i32") | {"p_grad_bias": "*fp32"}
        for chip, config in shipped(name, str(width)):
            constants = dict.fromkeys(switches, True) | {"AXES": 2, "BC": width} | config.blocks
            constants |= {n: 1 for n in strides if n.endswith("c")}
            found.append(
                Specimen(
                    f"{name} {dtype} c={width} {chip}",
                    kernel,
                    {k: v for k, v in signature.items() if k in kernel.arg_names},
                    {k: v for k, v in constants.items() if k in kernel.arg_names},
                    config.num_warps,
                    config.num_stages,
                    aligned=("channels", *strides),
                    chip=chip,
                )
            )
    return found


def specimens() -> list[Specimen]:
    """The kernel for every dtype, width of a row and configuration."""
    return specimens_of_rows("residual_update_forward", residual_update_forward_kernel)
