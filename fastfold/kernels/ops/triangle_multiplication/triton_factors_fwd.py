"""First kernel of triangle multiplication in Triton: normalise, project, gate and mask, channels first."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import (
    Kernel,
    configuration,
    normalised,
    row_statistics,
    rows_product,
)
from fastfold.kernels.common.triton_math import cast, precision

EPS = 1e-5

EXACT = {"norm_weight", "norm_bias", "norm_out_weight", "norm_out_bias"}
"""Arguments that are float32 whatever the dtype."""


@triton.jit
def pair_positions(i_m, n, BM: tl.constexpr):
    """Positions ``[BM]`` of the grid that a block covers, and their rows and columns."""
    o_m = tl.cast(i_m, tl.int64) * BM + tl.arange(0, BM)
    return o_m, o_m // n, o_m % n


@triton.jit(do_not_specialize=["n"])
def triangle_project_kernel(
    z,
    mask,
    sides,
    norm_weight,
    norm_bias,
    proj,
    proj_bias,
    gate,
    gate_bias,
    n,
    size,
    first,
    group,
    z_i,
    z_j,
    z_c,
    mask_i,
    mask_j,
    EPS,
    C: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BM positions, and fills ``sides [2 group, R N]``: channels ``first ..`` of left, then of right."""
    o_m, o_i, o_j = pair_positions(tl.program_id(0), n, BM)
    m_m = o_m < size
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    p_z = z + o_i * z_i + o_j * z_j
    # [BM, BZ]
    b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_m[:, None] & m_z[None, :], other=0.0).to(
        tl.float32
    )
    b_mean, b_rstd = row_statistics(b_z, m_z, CZ, EPS)
    b_norm = normalised(b_z, b_mean, b_rstd, norm_weight, norm_bias, o_z, m_z)
    # [BM]
    b_mask = tl.load(mask + o_i * mask_i + o_j * mask_j, mask=m_m, other=0.0).to(tl.float32)
    for i_h in range(0, 2 * group, BH):
        o_h = i_h + tl.arange(0, BH)
        m_h = o_h < 2 * group
        o_w = tl.where(o_h < group, first + o_h, C + first + o_h - group)
        b_side = rows_product(
            b_norm, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, proj + o_w * CZ, 1, m_m, m_h,
            CZ, BM, BZ, BH, BK, True, SPLIT, PRECISION,
        )  # fmt: skip
        b_side += tl.load(proj_bias + o_w, mask=m_h, other=0.0).to(tl.float32)[None, :]
        b_gate = rows_product(
            b_norm, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, gate + o_w * CZ, 1, m_m, m_h,
            CZ, BM, BZ, BH, BK, True, SPLIT, PRECISION,
        )  # fmt: skip
        b_gate += tl.load(gate_bias + o_w, mask=m_h, other=0.0).to(tl.float32)[None, :]
        b_side *= tl.sigmoid(b_gate) * b_mask[:, None]
        p_side = sides + o_h.to(tl.int64)[None, :] * size + o_m[:, None]
        tl.store(p_side, cast(b_side, sides.dtype.element_ty), mask=m_m[:, None] & m_h[None, :])


def project(
    sides: Tensor,
    z: Tensor,
    mask: Tensor,
    parameters: Sequence[Tensor],
    first: int,
    group: int,
    split: bool = False,
) -> None:
    """Fill ``sides [2 group, R, N]`` for rows ``z [R, N, c_z]`` of one batch element, from arranged parameters.

    With ``split`` a normalised row doesn't lose what rounding to the dtype of the weights costs.
    """
    rows, n, c_z = z.shape
    config = configuration("triangle_project", z, c_z)
    triangle_project_kernel[(triton.cdiv(rows * n, config.blocks["BM"]),)](
        z,
        mask,
        sides,
        *parameters[:6],
        n,
        rows * n,
        first,
        group,
        *z.stride(),
        *mask.stride(),
        EPS,
        C=len(parameters[2]) // 2,
        CZ=c_z,
        BZ=padded(c_z),
        SPLIT=split,
        PRECISION=precision(z),
        **config.launch,
    )


def kernels() -> dict[str, Kernel]:
    """The kernels of this file as they ship."""
    return {
        "triangle_project": Kernel(
            triangle_project_kernel,
            lambda c, dtype: {"C": c, "CZ": c, "BZ": padded(c), "SPLIT": dtype != torch.float32},
            ("size", "first", "group", "z_i", "z_j", "mask_i"),
            ("n",),
            ("z_c", "mask_j"),
            EXACT,
        ),
    }
