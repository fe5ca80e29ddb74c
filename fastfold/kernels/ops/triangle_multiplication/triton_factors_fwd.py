"""First kernel of triangle multiplication in Triton: normalise, project, gate and mask, channels first."""

# Arguments of kernels are untyped.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import KernelVariant, NewTensor, recorded_variants
from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import WIDTHS, configuration, load_normalised, projected
from fastfold.kernels.common.triton_math import cast, precision, sigmoid
from fastfold.kernels.ops.triangle_multiplication.params import EPS, FactorParams

SIZES = ["rows", "n", "width"]  #: Arguments of kernels whose divisibility changes nothing


@triton.jit
def pair_positions(i_m, size, rows, n, width, BM: tl.constexpr):
    """Return positions ``[BM]`` of a block of factors or product, which have ``size`` in rows of ``width``.

    Also return the mask of those that exist, their rows and columns, and the mask of those within the pair
    ``[rows, n]``: factors and product may have more and longer rows than the pair, filled with zeros.
    """
    first = tl.cast(i_m, tl.int64) * BM
    o_m = first + tl.arange(0, BM)
    m_m = o_m < size
    # Within the block in 32 bits, in which division is much cheaper.
    o_b = (first % width).to(tl.int32) + tl.arange(0, BM)
    o_i, o_j = (first // width).to(tl.int32) + o_b // width, o_b % width
    m_pair = m_m & (o_i < rows) & (o_j < n)
    return o_m, m_m, o_i.to(tl.int64), o_j.to(tl.int64), m_pair


@triton.jit
def load_pair(z, z_strides, weights, o_i, o_j, m_m, o_z, m_z, CZ, EPS):
    """Load and normalise positions ``[BM, BZ]`` of ``z [R, N, CZ]``; also return statistics, and pointers ``[BM]``."""
    p_z = z + o_i * z_strides[0] + o_j * z_strides[1]
    norm = (weights.norm_weight, weights.norm_bias)
    b_z, b_statistics = load_normalised(p_z, o_z * z_strides[2], norm, o_z, m_m, m_z, CZ, EPS)
    return b_z, b_statistics, p_z


@triton.jit
def load_mask(mask, strides, o_i, o_j, m_m):
    """Load the mask ``[BM]`` of positions, in float32."""
    return tl.load(mask + o_i * strides[0] + o_j * strides[1], mask=m_m, other=0.0).to(tl.float32)


@triton.jit
def projections_and_gates(
    b_z, p_z, z_c, b_statistics, weights, o_w, m_h, m_m,
    CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute projections and gates ``[BM, BH]`` of normalised positions, by rows ``o_w`` of the weights."""
    norm = (weights.norm_weight, weights.norm_bias)
    b_projection = projected(
        b_z, p_z, z_c, b_statistics, norm, weights.proj_weight, weights.proj_bias, o_w, m_m, m_h,
        CZ, BM, BZ, BH, BK, SPLIT, PRECISION,
    )  # fmt: skip
    b_gate = projected(
        b_z, p_z, z_c, b_statistics, norm, weights.gate_weight, weights.gate_bias, o_w, m_m, m_h,
        CZ, BM, BZ, BH, BK, SPLIT, PRECISION,
    )  # fmt: skip
    return b_projection, sigmoid(b_gate)


@triton.jit(do_not_specialize=SIZES)
def triangle_project_kernel(
    z, mask, projections, weights, rows, n, width, size, first, group, z_strides, mask_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill BM positions of ``projections [2 group, size]``: channels from ``first`` on of left, then of right."""
    o_m, m_m, o_i, o_j, m_pair = pair_positions(tl.program_id(0), size, rows, n, width, BM)
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_norm, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
    b_mask = load_mask(mask, mask_strides, o_i, o_j, m_pair)
    for i_h in range(0, 2 * group, BH):
        o_h = i_h + tl.arange(0, BH)
        m_h = o_h < 2 * group
        o_w = tl.where(o_h < group, first + o_h, C + first + o_h - group)
        b_projection, b_gate = projections_and_gates(
            b_norm, p_z, z_strides[2], b_statistics, weights, o_w, m_h, m_pair,
            CZ, BZ, BM, BH, BK, SPLIT, PRECISION,
        )  # fmt: skip
        b_projection *= b_gate * b_mask[:, None]
        p_projection = projections + o_h.to(tl.int64)[None, :] * size + o_m[:, None]
        m_projection = m_m[:, None] & m_h[None, :]
        tl.store(p_projection, cast(b_projection, projections.dtype.element_ty), mask=m_projection)


def project(
    projections: Tensor,
    z: Tensor,
    mask: Tensor,
    weights: FactorParams,
    first: int,
    group: int,
    split: bool = False,
) -> None:
    """Fill ``projections [2 group, R', N']`` for rows ``z [R, N, c_z]`` of one batch element, with zeros past them.

    With ``split`` a second product adds the part of a normalised row that rounding to the dtype of the weights removes.
    """
    rows, n, c_z = z.shape
    size, width = projections.shape[1] * projections.shape[2], projections.shape[2]
    config = configuration("triangle_project", z, c_z)
    launch(triangle_project_kernel, (triton.cdiv(size, config.blocks["BM"]),))(
        *(z, mask, projections, weights, rows, n, width, size, first, group, z.stride(), mask.stride(), EPS),
        C=len(weights.proj_weight) // 2,
        CZ=c_z,
        BZ=padded(c_z),
        SPLIT=split,
        PRECISION=precision(z, config),
        **config.launch,
    )


def example_parameters(new: NewTensor, c: int) -> FactorParams:
    """Return parameters with ``c`` channels of the pair and hidden ones; only their shapes count."""
    norm, weight, bias = new(c, dtype=torch.float32), new(2 * c, c), new(2 * c)
    return FactorParams(norm, norm, weight, bias, weight, bias)


def variants() -> list[KernelVariant]:
    """Record the kernel in every dtype and shipped configuration, as the backward pass launches it."""

    def launch(new: NewTensor, c: int) -> None:
        projections, z, mask = new(2 * c, 16, 16), new(16, 16, c), new(16, 16)
        project(projections, z, mask, example_parameters(new, c), 0, c, split=z.dtype == torch.bfloat16)

    return recorded_variants(launch, "C", WIDTHS)
