"""Triton kernel of :func:`fastfold.kernels.pair_bias`.

The normalised pair tensor exists in registers only, so that the pair tensor is read once.
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

from fastfold.kernels.common.constants import MOST_HEADS
from fastfold.kernels.common.kernel_variant import ARITHMETICS, TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import padded, rows_of
from fastfold.kernels.common.normalised_rows import WIDTHS
from fastfold.kernels.common.triton_math import cast, dot, precision, row_offset
from fastfold.kernels.common.tuning import launch_config, shipped
from fastfold.kernels.ops.layer_norm.triton_fwd import statistics

SIZES = ["count", "size_1", "size_2", "stride_head"]


@triton.jit(do_not_specialize=SIZES)
def pair_bias_forward_kernel(
    p_z,
    p_norm_weight,
    p_norm_bias,
    p_weight,
    p_out,
    count,
    channels,
    heads,
    size_1,
    size_2,
    stride_z0,
    stride_z1,
    stride_z2,
    stride_o0,
    stride_o1,
    stride_o2,
    stride_head,
    eps,
    AXES: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
):
    o_row = tl.program_id(0) * BT + tl.arange(0, BT)
    o_channel = tl.arange(0, BC)
    o_head = tl.arange(0, BH)
    m_row = o_row < count
    m_channel = o_channel < channels
    m_head = o_head < heads
    o_z = row_offset(o_row, size_1, size_2, stride_z0, stride_z1, stride_z2, AXES)
    # [BT, BC]
    m_z = m_row[:, None] & m_channel[None, :]
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
    o_out = row_offset(o_row, size_1, size_2, stride_o0, stride_o1, stride_o2, AXES)
    p_columns = p_out + o_out[:, None] + o_head.to(tl.int64)[None, :] * stride_head
    tl.store(p_columns, cast(b_out, p_out.dtype.element_ty), mask=m_row[:, None] & m_head[None, :])


def configuration_key(dtype: torch.dtype, channels: int) -> str:
    """Products of float32 hold their operands in registers, so they have entries of their own."""
    return f"{dtype.itemsize * 8}bit_{padded(channels)}"


def padded_blocks(heads: int, channels: int) -> dict[str, int]:
    """Block sizes of a kernel that holds all channels and all heads: powers of two."""
    return {"BC": padded(channels), "BH": padded(heads)}


def pair_bias_forward(
    z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Bias ``[*, H, A, B]`` of ``z [*, A, B, c]``; ``weight [H, c]`` in the dtype of ``z``."""
    heads, channels = weight.shape
    out = z.new_empty(*z.shape[:-3], heads, *z.shape[-3:-1])
    if z.numel() == 0:
        return out
    rows = rows_of(z, out.movedim(-3, -1), channels_apart=(1,))
    config = launch_config("pair_bias_forward", configuration_key(z.dtype, channels), z.device)
    pair_bias_forward_kernel[(triton.cdiv(rows.count, config.blocks["BT"]),)](
        rows.tensors[0],
        norm_weight.contiguous(),
        norm_bias.contiguous(),
        weight.contiguous(),
        out,
        rows.count,
        channels,
        heads,
        *rows.sizes,
        *rows.strides[0],
        *rows.strides[1],
        out.stride(-3),
        eps,
        AXES=rows.axes,
        PRECISION=precision(z),
        **padded_blocks(heads, channels),
        **config.launch,
    )
    return out


def specimens_of(direction: str, kernel: Any) -> list[Specimen]:
    """A kernel for every arithmetic, width of a pair tensor and configuration, with the most heads."""
    found = []
    for (arithmetic, dtype, products), width in itertools.product(ARITHMETICS, WIDTHS):
        for chip, config in shipped(f"pair_bias_{direction}", configuration_key(dtype, width)):
            data = dict.fromkeys(
                ("p_z", "p_out", "p_grad", "p_grad_z", "p_weight"), f"*{TRITON_TYPES[dtype]}"
            )
            exact = dict.fromkeys(("p_norm_weight", "p_norm_bias", "p_product", "p_sum"), "*fp32")
            sizes = dict.fromkeys((*SIZES, "channels", "heads"), "i32")
            strides = {f"stride_{t}{i}": "i32" for t in "gzo" for i in range(3)}
            constants = {"NEED_Z": True, "NEED_PARAMETERS": True, "AXES": 2, "PRECISION": products}
            constants |= {**padded_blocks(MOST_HEADS, width), **config.blocks, "stride_o2": 1, "stride_g2": 1}
            found.append(
                Specimen(
                    f"pair_bias_{direction} {arithmetic} c={width} {chip}",
                    kernel,
                    data | exact | sizes | strides | {"eps": "fp32"},
                    {k: v for k, v in constants.items() if k in kernel.arg_names},
                    config.num_warps,
                    config.num_stages,
                    aligned=("channels", "stride_z0", "stride_z1", "stride_z2"),
                    chip=chip,
                )
            )
    return found


def specimens() -> list[Specimen]:
    """The kernel as it ships."""
    return specimens_of("forward", pair_bias_forward_kernel)
