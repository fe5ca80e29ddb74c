"""Triton kernels of :func:`fastfold.kernels.pair_bias`.

The normalised pair tensor exists in registers only: forward is one reading of the pair tensor, backward one reading
and one writing. Everything that the parameters' gradients need is two sums over the positions t, of the gradient
g [t, H] and the normalised input x̂ [t, c] before its scale w and shift b: M = gᵀ x̂ and s = Σ g. Then

    dW = M w + s b,   dw = Σ_h W M,   db = Σ_h W s.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.ahead_of_time import ARITHMETICS, TRITON_TYPES, Specimen
from fastfold.kernels.layer_norm_triton import statistics
from fastfold.kernels.layout import padded
from fastfold.kernels.normalised_rows import WIDTHS
from fastfold.kernels.pair_bias import MOST_HEADS
from fastfold.kernels.strided_rows import row_offset, rows_of
from fastfold.kernels.triton_arithmetic import cast, dot, precision
from fastfold.kernels.tuning import launch_config, shipped

PROGRAMS = 512
"""Most programs of the backward pass, and so terms of the second sum; the same on every GPU, as the results are."""

_SIZES = ["count", "size_1", "size_2", "stride_head"]


@triton.jit(do_not_specialize=_SIZES)
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


@triton.jit(do_not_specialize=_SIZES)
def pair_bias_backward_kernel(
    p_grad,
    p_z,
    p_norm_weight,
    p_weight,
    p_grad_z,
    p_product,
    p_sum,
    count,
    channels,
    heads,
    size_1,
    size_2,
    stride_g0,
    stride_g1,
    stride_g2,
    stride_z0,
    stride_z1,
    stride_z2,
    stride_head,
    eps,
    AXES: tl.constexpr,
    PRECISION: tl.constexpr,
    NEED_Z: tl.constexpr,
    NEED_PARAMETERS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
):
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
        o_z = row_offset(o_row, size_1, size_2, stride_z0, stride_z1, stride_z2, AXES)
        o_grad = row_offset(o_row, size_1, size_2, stride_g0, stride_g1, stride_g2, AXES)
        # [BT, BC]
        b_z = tl.load(p_z + o_z[:, None] + o_channel[None, :], mask=m_z, other=0.0).to(tl.float32)
        # [BT, BH]
        p_columns = p_grad + o_grad[:, None] + o_head.to(tl.int64)[None, :] * stride_head
        b_grad = tl.load(p_columns, mask=m_row[:, None] & m_head[None, :], other=0.0)
        b_normed, b_rstd = statistics(b_z, m_channel, channels, eps)
        if NEED_PARAMETERS:
            b_product += dot(tl.trans(b_grad), cast(b_normed, b_weight.dtype), PRECISION)
            b_sum += tl.sum(b_grad.to(tl.float32), 0)
        if NEED_Z:
            b_grad_z = dot(b_grad, b_weight, PRECISION) * b_norm_weight[None, :]
            b_mean = tl.sum(b_grad_z, 1) / channels
            b_slope = tl.sum(b_grad_z * b_normed, 1) / channels
            b_grad_z = (b_grad_z - b_mean[:, None] - b_normed * b_slope[:, None]) * b_rstd[:, None]
            p_row = p_grad_z + o_row.to(tl.int64)[:, None] * channels + o_channel[None, :]
            tl.store(p_row, cast(b_grad_z, p_grad_z.dtype.element_ty), mask=m_z)
    if NEED_PARAMETERS:
        p_rows = p_product + (i_program * heads + o_head)[:, None] * channels + o_channel[None, :]
        tl.store(p_rows, b_product, mask=m_weight)
        tl.store(p_sum + i_program * heads + o_head, b_sum, mask=m_head)


def _key(dtype: torch.dtype, channels: int) -> str:
    """Products of float32 hold their operands in registers, so they have entries of their own."""
    return f"{dtype.itemsize * 8}bit_{padded(channels)}"


def _blocks(heads: int, channels: int) -> dict[str, int]:
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
    config = launch_config("pair_bias_forward", _key(z.dtype, channels), z.device)
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
        **_blocks(heads, channels),
        **config.launch,
    )
    return out


def pair_bias_backward(
    grad: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    eps: float,
    need_z: bool,
    need_parameters: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradient for ``z``, and those for the three parameters in float32, where they are asked for."""
    heads, channels = weight.shape
    rows = rows_of(grad.movedim(-3, -1), z, channels_apart=(0,))
    config = launch_config("pair_bias_backward", _key(z.dtype, channels), z.device)
    programs = min(PROGRAMS, triton.cdiv(rows.count, config.blocks["BT"]))
    grad_z = torch.empty(z.shape, dtype=z.dtype, device=z.device) if need_z else None
    product = z.new_empty(programs, heads, channels, dtype=torch.float32) if need_parameters else None
    total = z.new_empty(programs, heads, dtype=torch.float32) if need_parameters else None
    if rows.count > 0:
        pair_bias_backward_kernel[(programs,)](
            *rows.tensors,
            norm_weight.contiguous(),
            weight.contiguous(),
            grad_z,
            product,
            total,
            rows.count,
            channels,
            heads,
            *rows.sizes,
            *rows.strides[0],
            *rows.strides[1],
            rows.tensors[0].stride(-1),
            eps,
            AXES=rows.axes,
            PRECISION=precision(z),
            NEED_Z=need_z,
            NEED_PARAMETERS=need_parameters,
            **_blocks(heads, channels),
            **config.launch,
        )
    if product is None or total is None:
        return grad_z, []
    product, sums, weight = product.sum(0), total.sum(0)[:, None], weight.float()
    grad_weight = product * norm_weight.float() + sums * norm_bias.float()
    return grad_z, [(weight * product).sum(0), (weight * sums).sum(0), grad_weight]


def specimens() -> list[Specimen]:
    """Both kernels for every arithmetic, width of a pair tensor and configuration, with the most heads."""
    kernels = {"forward": pair_bias_forward_kernel, "backward": pair_bias_backward_kernel}
    found = []
    for (arithmetic, dtype, products), width, (direction, kernel) in itertools.product(
        ARITHMETICS, WIDTHS, kernels.items()
    ):
        for chip, config in shipped(f"pair_bias_{direction}", _key(dtype, width)):
            data = dict.fromkeys(
                ("p_z", "p_out", "p_grad", "p_grad_z", "p_weight"), f"*{TRITON_TYPES[dtype]}"
            )
            exact = dict.fromkeys(("p_norm_weight", "p_norm_bias", "p_product", "p_sum"), "*fp32")
            sizes = dict.fromkeys((*_SIZES, "channels", "heads"), "i32")
            strides = {f"stride_{t}{i}": "i32" for t in "gzo" for i in range(3)}
            constants = {"NEED_Z": True, "NEED_PARAMETERS": True, "AXES": 2, "PRECISION": products}
            constants |= {**_blocks(MOST_HEADS, width), **config.blocks, "stride_o2": 1, "stride_g2": 1}
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
