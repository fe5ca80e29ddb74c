"""What the Triton kernels share that normalise the rows of a tensor and multiply them by weights."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import ARITHMETICS, TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.triton_math import cast, dot
from fastfold.kernels.common.tuning import LaunchConfig, launch_config, shipped

WIDTHS = (16, 32, 64, 128, 256)
"""Padded channels that configurations ship for; no wider, because a program holds whole rows in its registers."""

PROGRAMS = 1024
"""Programs at most where each leaves a partial sum behind; the same on every GPU, so that the sums are the same."""

WEIGHT_PROGRAMS = 512
"""Programs at least, if there is work for so many, of kernels that sum the gradients of weights."""


def configuration(kernel: str, x: Tensor, channels: int) -> LaunchConfig:
    """Launch configuration for data like ``x`` with so many channels (keys ``16bit_128``, ``32bit_64``)."""
    config = launch_config(kernel, configuration_key(x.dtype, channels), x.device)
    return shrunk(config, channels)


def configuration_key(dtype: torch.dtype, channels: int) -> str:
    """Key of the table; bfloat16 and float16 share their entries."""
    return f"{dtype.itemsize * 8}bit_{padded(channels)}"


def shrunk(config: LaunchConfig, channels: int) -> LaunchConfig:
    """The configuration with chunks of channels (``BK``) no wider than the rows."""
    blocks = dict(config.blocks)
    if "BK" in blocks:
        blocks["BK"] = min(blocks["BK"], padded(channels))
    return LaunchConfig(blocks, config.num_warps, config.num_stages)


def splits(rows: int, block: int, programs: int) -> int:
    """Parts into which the rows are cut for a grid of ``programs`` other programs: a power of two."""
    parts = max(1, WEIGHT_PROGRAMS // programs)
    return min(triton.next_power_of_2(triton.cdiv(rows, block)), triton.next_power_of_2(parts))


@triton.jit
def row_statistics(b_x, m_c, C, EPS):
    """Mean and reciprocal standard deviation ``[BM]`` of rows ``[BM, BC]`` in float32, zero past channel C."""
    b_mean = tl.sum(b_x, 1) / C
    b_centred = tl.where(m_c[None, :], b_x - b_mean[:, None], 0.0)
    return b_mean, tl.rsqrt(tl.sum(b_centred * b_centred, 1) / C + EPS)


@triton.jit
def normalised(b_x, b_mean, b_rstd, norm_weight, norm_bias, o_c, m_c):
    """Normalised rows ``[BM, BC]``, scaled and shifted; zero past the last channel."""
    # [BC]
    b_weight = tl.load(norm_weight + o_c, mask=m_c, other=0.0)
    b_bias = tl.load(norm_bias + o_c, mask=m_c, other=0.0)
    return (b_x - b_mean[:, None]) * b_rstd[:, None] * b_weight[None, :] + b_bias[None, :]


@triton.jit
def normalised_backward(b_grad, b_x, b_mean, b_rstd, norm_weight, o_c, m_c, C):
    """Gradient ``[BM, BC]`` of rows whose normalised ones have gradient ``b_grad``; also that of the scale's rows."""
    # [BC]
    b_weight = tl.load(norm_weight + o_c, mask=m_c, other=0.0)
    b_hat = tl.where(m_c[None, :], (b_x - b_mean[:, None]) * b_rstd[:, None], 0.0)
    b_scaled = b_grad * b_weight[None, :]
    b_along = tl.sum(b_scaled * b_hat, 1) / C
    b_level = tl.sum(b_scaled, 1) / C
    return b_rstd[:, None] * (b_scaled - b_level[:, None] - b_hat * b_along[:, None]), b_grad * b_hat


@triton.jit
def split_dot(x, w, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """``x [M, K] @ w [K, N]`` for ``x`` in float32, rounded to the dtype of ``w``.

    With SPLIT a second product carries what ``x`` loses by rounding.
    """
    b_cast = cast(x, w.dtype)
    b_out = dot(b_cast, w, PRECISION)
    if SPLIT:
        b_out += dot(cast(x - b_cast.to(tl.float32), w.dtype), w, PRECISION)
    return b_out


@triton.jit
def rows_product(
    b_rows,
    p_x,
    x_c,
    b_mean,
    b_rstd,
    norm_weight,
    norm_bias,
    p_w,
    w_c,
    m_m,
    m_h,
    C: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products ``[BM, BH]`` of rows ``[BM, C]`` with BH columns of weights, accumulated in float32.

    Args:
        b_rows: ``[BM, BC]``, the rows as they enter the product. Used if BK is BC: one product over all channels.
        p_x: ``[BM]``, pointers to the rows, from which they are read again in chunks of BK channels otherwise.
            Products of float32 without tensor cores need that: they hold their operands in registers.
        x_c: Stride of the channels.
        b_mean: ``[BM]``, statistics of the rows.
        b_rstd: ``[BM]``.
        norm_weight: Scale of the normalisation of rows that are read again.
        norm_bias: Its shift.
        p_w: ``[BH]``, pointers to the columns of the weights.
        w_c: Stride of the channels there.
        m_m: ``[BM]``, rows that exist.
        m_h: ``[BH]``, columns that exist.
        C: Channels.
        BM: Rows.
        BC: Channels, padded.
        BH: Columns of weights.
        BK: Channels at a time.
        NORMALISE: Whether rows that are read again are to be normalised.
        SPLIT: Whether to carry what the rows lose by rounding in a second product.
        PRECISION: ``input_precision``.
    """
    if BK == BC:
        o_c = tl.arange(0, BC)
        # [BC, BH]
        p_block = p_w[None, :] + o_c[:, None] * w_c
        b_w = tl.load(p_block, mask=(o_c < C)[:, None] & m_h[None, :], other=0.0)
        b_out = split_dot(b_rows, b_w, SPLIT, PRECISION)
    else:
        b_out = tl.zeros([BM, BH], tl.float32)
        for i_k in range(0, C, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < C
            # [BM, BK]
            p_chunk = p_x[:, None] + o_k.to(tl.int64)[None, :] * x_c
            b_chunk = tl.load(p_chunk, mask=m_m[:, None] & m_k[None, :], other=0.0).to(tl.float32)
            if NORMALISE:
                b_chunk = normalised(b_chunk, b_mean, b_rstd, norm_weight, norm_bias, o_k, m_k)
            # [BK, BH]
            b_w = tl.load(p_w[None, :] + o_k[:, None] * w_c, mask=m_k[:, None] & m_h[None, :], other=0.0)
            b_out += split_dot(b_chunk, b_w, SPLIT, PRECISION)
    return b_out


@dataclass(frozen=True)
class Kernel:
    """A kernel whose specimens are to be made.

    Attributes:
        kernel: The ``triton.jit`` function.
        constants: ``tl.constexpr`` arguments by channels and dtype, without block sizes and PRECISION.
        integers: Run-time arguments that are 32-bit integers and multiples of 16.
        sizes: Run-time arguments that are any 32-bit integers.
        ones: Strides that are 1.
        exact: Pointers to float32 whatever the dtype.
        always_exact: Whether products of float32 are exact even where PyTorch's setting allows tf32.
    """

    kernel: Any
    constants: Callable[[int, torch.dtype], dict[str, Any]]
    integers: Sequence[str]
    sizes: Sequence[str]
    ones: Sequence[str]
    exact: Collection[str]
    always_exact: bool = False


def specimens_of(kernels: Mapping[str, Kernel]) -> list[Specimen]:
    """The kernels, by their name in the table, in every dtype, number of channels and configuration."""
    return [
        specimen(f"{name} {arithmetic} C={c} {chip}", kernel, dtype, precision, c, chip, config)
        for name, kernel in kernels.items()
        for (arithmetic, dtype, precision), c in itertools.product(ARITHMETICS, WIDTHS)
        for chip, config in shipped(name, configuration_key(dtype, c))
        if precision == "ieee" or not kernel.always_exact
    ]


def specimen(
    name: str,
    kernel: Kernel,
    dtype: torch.dtype,
    precision: str,
    c: int,
    chip: str,
    config: LaunchConfig,
) -> Specimen:
    """A kernel with c channels of a dtype, in a configuration of a class of chips."""
    config = shrunk(config, c)
    constants = kernel.constants(c, dtype) | dict.fromkeys(kernel.ones, 1) | config.blocks
    constants["PRECISION"] = precision
    signature = {}
    for argument in kernel.kernel.arg_names:
        if argument in constants:
            continue
        if argument in kernel.integers or argument in kernel.sizes:
            signature[argument] = "i32"
        elif argument in ("EPS", "eps"):
            signature[argument] = "fp32"
        else:
            signature[argument] = "*fp32" if argument in kernel.exact else f"*{TRITON_TYPES[dtype]}"
    return Specimen(
        name, kernel.kernel, signature, constants, config.num_warps, config.num_stages, kernel.integers, chip
    )
