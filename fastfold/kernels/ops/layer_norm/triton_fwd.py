"""Triton kernel of :func:`fastfold.kernels.layer_norm`.

A program holds whole rows, so that the mean, the variance and the result cost one reading of the tensor.
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

from fastfold.kernels.common.kernel_variant import TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import ROW_WIDTHS, padded, rows_of
from fastfold.kernels.common.triton_math import cast, row_offset
from fastfold.kernels.common.tuning import launch_config, shipped

SIZES = ["count", "size_1", "size_2"]


@triton.jit
def statistics(b_x, m_channel, channels, eps):
    """Rows ``b_x [BT, BC]`` (0 beyond the channels) normalised, and their reciprocal standard deviations ``[BT]``."""
    b_mean = tl.sum(b_x, 1) / channels
    b_centred = tl.where(m_channel[None, :], b_x - b_mean[:, None], 0.0)
    b_rstd = 1.0 / tl.sqrt_rn(tl.sum(b_centred * b_centred, 1) / channels + eps)
    return b_centred * b_rstd[:, None], b_rstd


@triton.jit(do_not_specialize=SIZES)
def layer_norm_forward_kernel(
    p_x,
    p_weight,
    p_bias,
    p_out,
    count,
    channels,
    size_1,
    size_2,
    stride_x0,
    stride_x1,
    stride_x2,
    eps,
    AXES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    o_row = tl.program_id(0) * BT + tl.arange(0, BT)
    o_channel = tl.arange(0, BC)
    m_channel = o_channel < channels
    m_x = (o_row < count)[:, None] & m_channel[None, :]
    o_x = row_offset(o_row, size_1, size_2, stride_x0, stride_x1, stride_x2, AXES)
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
    """Contiguous result of the normalisation of ``x [*, c]``, c at most 4,096."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    rows = rows_of(x)
    config = launch_config("layer_norm_forward", str(padded(x.shape[-1])), x.device)
    layer_norm_forward_kernel[(triton.cdiv(rows.count, config.blocks["BT"]),)](
        rows.tensors[0],
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        rows.count,
        x.shape[-1],
        *rows.sizes,
        *rows.strides[0],
        eps,
        AXES=rows.axes,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BC=padded(x.shape[-1]),
        **config.launch,
    )
    return out


def specimens_of(direction: str, kernel: Any) -> list[Specimen]:
    """A kernel for every dtype, length class of a row and configuration."""
    found = []
    for dtype, width in itertools.product(TRITON_TYPES.values(), ROW_WIDTHS):
        for chip, config in shipped(f"layer_norm_{direction}", str(width)):
            data = dict.fromkeys(("p_x", "p_out", "p_grad", "p_grad_x"), f"*{dtype}")
            parameters = dict.fromkeys(("p_weight", "p_bias", "p_grad_weight", "p_grad_bias"), "*fp32")
            sizes = dict.fromkeys((*SIZES, "channels"), "i32")
            strides = {f"stride_{t}{i}": "i32" for t in "gx" for i in range(3)}
            switches = ("HAS_WEIGHT", "HAS_BIAS", "NEED_X", "NEED_WEIGHT", "NEED_BIAS")
            constants = dict.fromkeys(switches, True) | {"AXES": 2, "BC": width, **config.blocks}
            found.append(
                Specimen(
                    f"layer_norm_{direction} {dtype} c={width} {chip}",
                    kernel,
                    data | parameters | sizes | strides | {"eps": "fp32"},
                    {k: v for k, v in constants.items() if k in kernel.arg_names},
                    config.num_warps,
                    config.num_stages,
                    aligned=("channels", *strides),
                    chip=chip,
                )
            )
    return found


def specimens() -> list[Specimen]:
    """The kernel as it ships."""
    return specimens_of("forward", layer_norm_forward_kernel)
