"""Parts of Triton kernels that normalise the rows of a tensor and multiply them by weights."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.triton_math import cast, dot, products_suffix
from fastfold.kernels.common.tuning import LaunchConfig, launch_config

PROGRAMS = 1024
"""Maximum number of programs that write a partial sum; equal on every GPU, so that sums are too."""

WEIGHT_PROGRAMS = 512
"""Minimum number of programs, if there is work for them, of kernels that sum the gradients of weights."""


def configuration(kernel: str, x: Tensor, channels: int, suffix: str = "") -> LaunchConfig:
    """Return the launch configuration for data like ``x``; chunks of channels (``BK``) are at most ``channels``.

    Keys are ``16bit_128`` or ``32bit_64``, with a suffix; bfloat16 and float16 share their entries.
    """
    width = padded(channels)
    key = f"{x.dtype.itemsize * 8}bit_{width}{suffix}{products_suffix(x)}"
    config = launch_config(kernel, key, x.device)
    blocks = dict(config.blocks)
    if "BK" in blocks:
        blocks["BK"] = min(blocks["BK"], width)
    return replace(config, blocks=blocks)


def splits(rows: int, block: int, programs: int) -> int:
    """Return the parts of the rows, a power of two, for a grid with ``programs`` along its other axis."""
    parts = max(1, WEIGHT_PROGRAMS // programs)
    return min(triton.next_power_of_2(triton.cdiv(rows, block)), triton.next_power_of_2(parts))


@triton.jit
def row_statistics(b_x, m_c, C, EPS):
    """Compute mean and reciprocal standard deviation ``[BM]`` of rows ``[BM, BC]`` in float32, zero past channel C."""
    b_mean = tl.sum(b_x, 1) / C
    b_centered = tl.where(m_c[None, :], b_x - b_mean[:, None], 0.0)
    return b_mean, tl.rsqrt(tl.sum(b_centered * b_centered, 1) / C + EPS)


@triton.jit
def normalized(b_x, b_statistics, norm, o_c, m_c):
    """Normalise rows ``[BM, BC]`` by their statistics, scale and shift them by ``norm``; zero past the last channel."""
    # [BC]
    b_weight = tl.load(norm[0] + o_c, mask=m_c, other=0.0)
    b_bias = tl.load(norm[1] + o_c, mask=m_c, other=0.0)
    b_mean, b_rstd = b_statistics
    return (b_x - b_mean[:, None]) * b_rstd[:, None] * b_weight[None, :] + b_bias[None, :]


@triton.jit
def load_normalized(p_x, o_x, norm, o_c, m_m, m_c, C, EPS):
    """Load and normalise rows ``[BM, BC]`` at ``p_x [BM]`` with channel offsets ``o_x [BC]``; return statistics too."""
    # [BM, BC]
    b_x = tl.load(p_x[:, None] + o_x[None, :], mask=m_m[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    b_statistics = row_statistics(b_x, m_c, C, EPS)
    return normalized(b_x, b_statistics, norm, o_c, m_c), b_statistics


@triton.jit
def normalized_backward(b_grad, b_x, b_statistics, norm, o_c, m_c, C):
    """Compute gradients ``[BM, BC]`` of rows, and the scale's for each row, from normalised rows' gradients."""
    # [BC]
    b_weight = tl.load(norm[0] + o_c, mask=m_c, other=0.0)
    b_mean, b_rstd = b_statistics
    b_hat = tl.where(m_c[None, :], (b_x - b_mean[:, None]) * b_rstd[:, None], 0.0)
    b_scaled = b_grad * b_weight[None, :]
    b_along = tl.sum(b_scaled * b_hat, 1) / C
    b_level = tl.sum(b_scaled, 1) / C
    return b_rstd[:, None] * (b_scaled - b_level[:, None] - b_hat * b_along[:, None]), b_grad * b_hat


@triton.jit
def add_sums(p_sums, b_rows, m_c, first):
    """Add the sums of rows ``b_rows [BM, BC]`` to the program's own ``p_sums [BC]``; ``first`` replaces them."""
    # Between the blocks of a program the sums are in memory: in registers each thread would hold a fourth of them.
    b_sums = tl.load(p_sums, mask=m_c & (not first), other=0.0)
    tl.store(p_sums, b_sums + tl.sum(b_rows, 0), mask=m_c)


@triton.jit
def split_dot(x, w, SPLIT: tl.constexpr, PRECISION: tl.constexpr, start=None):
    """Compute ``x [M, K] @ w [K, N]`` plus ``start``, with ``x`` rounded to the dtype of ``w``.

    SPLIT adds the product of the part that rounding removes.
    """
    b_cast = cast(x, w.dtype)
    if SPLIT:
        start = dot(cast(x - b_cast.to(tl.float32), w.dtype), w, PRECISION, start)
    return dot(b_cast, w, PRECISION, start)


@triton.jit
def rows_product(
    b_rows, p_x, x_c, b_statistics, norm, p_w, w_c, m_m, m_h,
    C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    NORMALIZE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute products ``[BM, BH]`` of rows ``[BM, C]`` with BH columns of weights, accumulated in float32.

    If BK is BC, one product takes all channels of ``b_rows [BM, BC]``. Otherwise the rows at ``p_x [BM]``, with stride
    ``x_c`` of the channels, are read again in chunks of BK channels, because products of float32 without tensor cores
    hold their operands in registers. With NORMALISE these are normalised by ``b_statistics``, scale and shift ``norm``.
    ``p_w [BH]`` points to the columns of the weights, with stride ``w_c`` of the channels. For SPLIT see
    :func:`split_dot`.
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
            if NORMALIZE:
                b_chunk = normalized(b_chunk, b_statistics, norm, o_k, m_k)
            # [BK, BH]
            b_w = tl.load(p_w[None, :] + o_k[:, None] * w_c, mask=m_k[:, None] & m_h[None, :], other=0.0)
            b_out = split_dot(b_chunk, b_w, SPLIT, PRECISION, b_out)
    return b_out


@triton.jit
def projected(
    b_rows, p_x, x_c, b_statistics, norm, p_weight, p_bias, o_h, m_m, m_h,
    C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute outputs ``o_h [BH]`` of a linear layer ``weight [*, C]`` with bias for normalised rows."""
    KC: tl.constexpr = BK if BK < BC else BC
    b_out = rows_product(
        b_rows, p_x, x_c, b_statistics, norm, p_weight + o_h * C, 1, m_m, m_h,
        C, BM, BC, BH, KC, True, SPLIT, PRECISION,
    )  # fmt: skip
    return b_out + tl.load(p_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
