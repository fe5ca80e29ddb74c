"""Outer product mean in Triton: products of two columns exist for one tile of pairs and channels, in registers."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import Specimen
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import Kernel, configuration, specimens_of
from fastfold.kernels.common.triton_math import cast, dot, precision
from fastfold.kernels.ops.outer_product_mean.eager import batch_indices, norm_of

OUTER_CHANNELS = 32
"""Channels of a column in the networks that configurations ship for."""


@triton.jit
def masked_columns(
    x, mask, x_s, x_i, x_c, mask_s, mask_i, i_s, i_i, i_c, sequences, columns,
    C: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Tile ``[BS, BI * BC]`` of ``x [S, I, C]`` times its mask: sequences, then columns with their channels."""
    o_s = tl.cast(i_s, tl.int64) + tl.arange(0, BS)
    o_x = tl.arange(0, BI * BC)
    o_i = tl.cast(i_i, tl.int64) + o_x // BC
    o_c = i_c + o_x % BC
    m_s = o_s < sequences
    m_i = o_i < columns
    # [BS, BI * BC]
    p_x = x + o_s[:, None] * x_s + (o_i * x_i + o_c * x_c)[None, :]
    b_x = tl.load(p_x, mask=m_s[:, None] & (m_i & (o_c < C))[None, :], other=0.0)
    # [BS, BI * BC]
    p_mask = mask + o_s[:, None] * mask_s + (o_i * mask_i)[None, :]
    b_mask = tl.load(p_mask, mask=m_s[:, None] & m_i[None, :], other=0.0)
    return cast(b_x.to(tl.float32) * b_mask.to(tl.float32), x.dtype.element_ty)


@triton.jit
def outer_products(
    left, right, left_mask, right_mask, l_s, l_i, l_c, r_s, r_j, r_c, lm_s, lm_i, rm_s, rm_j,
    i_i, i_j, i_a, i_e, sequences, rows, columns,
    C: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over the sequences ``[BI * BJ, BA * BE]``: pairs of columns, and pairs of their channels."""
    b_sum = tl.zeros([BI * BA, BJ * BE], tl.float32)
    for i_s in range(0, sequences, BS):
        b_l = masked_columns(
            left, left_mask, l_s, l_i, l_c, lm_s, lm_i, i_s, i_i, i_a, sequences, rows, C, BS, BI, BA
        )
        b_r = masked_columns(
            right, right_mask, r_s, r_j, r_c, rm_s, rm_j, i_s, i_j, i_e, sequences, columns, C, BS, BJ, BE
        )
        b_sum += dot(tl.trans(b_l), b_r, PRECISION)
    b_sum = tl.permute(tl.reshape(b_sum, [BI, BA, BJ, BE]), (0, 2, 1, 3))
    return tl.reshape(b_sum, [BI * BJ, BA * BE])


@triton.jit(do_not_specialize=["sequences", "rows", "columns"])
def outer_product_mean_forward_kernel(
    left,
    right,
    left_mask,
    right_mask,
    weight,
    bias,
    norm,
    residual,
    out,
    sequences,
    rows,
    columns,
    l_s,
    l_i,
    l_c,
    r_s,
    r_j,
    r_c,
    lm_s,
    lm_i,
    rm_s,
    rm_j,
    residual_i,
    residual_j,
    residual_c,
    out_i,
    out_j,
    out_c,
    C: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BA: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BI times BJ pairs with all their channels."""
    i_i = tl.program_id(0) // tl.cdiv(columns, BJ) * BI
    i_j = tl.program_id(0) % tl.cdiv(columns, BJ) * BJ
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    o_k = tl.arange(0, BA * BE)
    b_out = tl.zeros([BI * BJ, BZ], tl.float32)
    for i_a in range(0, C, BA):
        for i_e in range(0, C, BE):
            b_products = outer_products(
                left, right, left_mask, right_mask, l_s, l_i, l_c, r_s, r_j, r_c, lm_s, lm_i, rm_s, rm_j,
                i_i, i_j, i_a, i_e, sequences, rows, columns, C, BI, BJ, BA, BE, BS, PRECISION,
            )  # fmt: skip
            o_a, o_e = i_a + o_k // BE, i_e + o_k % BE
            m_k = (o_a < C) & (o_e < C)
            # [BA * BE, BZ]
            p_w = weight + (o_a * C + o_e)[:, None] + o_z[None, :] * (C * C)
            b_w = tl.load(p_w, mask=m_k[:, None] & m_z[None, :], other=0.0)
            b_out += dot(cast(b_products, weight.dtype.element_ty), b_w, PRECISION)
    o_p = tl.arange(0, BI * BJ)
    o_i = tl.cast(i_i, tl.int64) + o_p // BJ
    o_j = tl.cast(i_j, tl.int64) + o_p % BJ
    m_p = (o_i < rows) & (o_j < columns)
    m_out = m_p[:, None] & m_z[None, :]
    # [BI * BJ]
    b_norm = tl.load(norm + o_i * columns + o_j, mask=m_p, other=1.0)
    b_out += tl.load(bias + o_z, mask=m_z, other=0.0).to(tl.float32)[None, :]
    b_out = b_out / b_norm[:, None]
    if HAS_RESIDUAL:
        p_residual = residual + (o_i * residual_i + o_j * residual_j)[:, None] + o_z[None, :] * residual_c
        b_out += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
    p_out = out + (o_i * out_i + o_j * out_j)[:, None] + o_z[None, :] * out_c
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_out)


def forward(
    right: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor,
    left: Tensor,
    left_mask: Tensor,
    residual: Tensor | None,
) -> None:
    """Fill ``out``, which may be ``residual``; arguments as of ``outer_product_mean``."""
    if out.numel() == 0:
        return
    c, c_z = left.shape[-1], len(bias)
    weight, bias = weight.to(left.dtype).contiguous(), bias.to(left.dtype).contiguous()
    config = configuration("outer_product_mean_forward", left, c_z)
    for i in batch_indices(left):
        (sequences, rows, _), columns = left[i].shape, right.shape[-2]
        b_residual = out[i] if residual is None else residual[i]
        programs = triton.cdiv(rows, config.blocks["BI"]) * triton.cdiv(columns, config.blocks["BJ"])
        outer_product_mean_forward_kernel[(programs,)](
            left[i],
            right[i],
            left_mask[i],
            right_mask[i],
            weight,
            bias,
            norm_of(left_mask[i], right_mask[i], eps),
            b_residual,
            out[i],
            sequences,
            rows,
            columns,
            *left[i].stride(),
            *right[i].stride(),
            *left_mask[i].stride(),
            *right_mask[i].stride(),
            *b_residual.stride(),
            *out[i].stride(),
            C=c,
            CZ=c_z,
            BZ=padded(c_z),
            HAS_RESIDUAL=residual is not None,
            PRECISION=precision(left),
            **config.launch,
        )


def specimens() -> list[Specimen]:
    """Every kernel in every dtype and configuration that ships."""
    integers = ("l_s", "l_i", "r_s", "r_j", "residual_i", "residual_j", "out_i", "out_j")
    return specimens_of(
        {
            "outer_product_mean_forward": Kernel(
                outer_product_mean_forward_kernel,
                lambda c, dtype: {"C": OUTER_CHANNELS, "CZ": c, "BZ": padded(c), "HAS_RESIDUAL": True},
                integers,
                ("sequences", "rows", "columns", "lm_s", "rm_s"),
                ("l_c", "r_c", "lm_i", "rm_j", "residual_c", "out_c"),
                {"norm"},
            )
        }
    )
