"""Outer product mean in Triton: products of two columns exist in registers, for one tile of pairs and channels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded, part
from fastfold.kernels.common.normalized_rows import configuration
from fastfold.kernels.common.shared_masks import once
from fastfold.kernels.common.triton_math import cast, dot, pair_tile, precision
from fastfold.kernels.ops.outer_product_mean.eager import batch_indices, counts_of

SIZES = ["sequences", "rows", "columns"]  #: Sizes that kernels are not specialised on


class Projections(NamedTuple):
    """Both projections ``[S, I, C]`` and ``[S, J, C]``, contiguous and times their masks."""

    left: Any
    right: Any


@triton.jit
def columns_pointers(
    x, i_s, i_i, i_c, columns, C: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr
):
    """Return pointers to a tile ``[BS, BI * BC]`` of ``x [S, I, C]``, and the mask of columns and channels."""
    o_s = tl.cast(i_s, tl.int64) + tl.arange(0, BS)
    o_x = tl.arange(0, BI * BC)
    o_i, o_c = i_i + o_x // BC, i_c + o_x % BC
    m_x = o_i < columns
    if C % BC != 0:
        m_x = m_x & (o_c < C)
    return x + o_s[:, None] * (columns * C) + (o_i * C + o_c)[None, :], m_x


@triton.jit
def outer_products(
    x, i_i, i_j, i_a, i_e, sequences, rows, columns,
    C: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute sums over the sequences ``[BI * BJ, BA * BE]``: pairs of columns, and pairs of their channels."""
    b_sum = tl.zeros([BI * BA, BJ * BE], tl.float32)
    o_s = tl.arange(0, BS)
    # [BS, BI * BA], [BS, BJ * BE]
    p_l, m_l = columns_pointers(x.left, 0, i_i, i_a, rows, C, BS, BI, BA)
    p_r, m_r = columns_pointers(x.right, 0, i_j, i_e, columns, C, BS, BJ, BE)
    for i_s in range(0, sequences, BS):
        m_s = (o_s < sequences - i_s)[:, None]
        i_x = tl.cast(i_s, tl.int64) * C
        b_l = tl.load(p_l + i_x * rows, mask=m_s & m_l[None, :], other=0.0)
        b_r = tl.load(p_r + i_x * columns, mask=m_s & m_r[None, :], other=0.0)
        b_sum = dot(tl.trans(b_l), b_r, PRECISION, b_sum)
    b_sum = tl.permute(tl.reshape(b_sum, [BI, BA, BJ, BE]), (0, 2, 1, 3))
    return tl.reshape(b_sum, [BI * BJ, BA * BE])


@triton.jit
def weights_tile(weight, o_z, m_z, o_a, o_e, C: tl.constexpr, BA: tl.constexpr, BE: tl.constexpr):
    """Load a tile ``[*, BA * BE]`` of ``weight [CZ, C, C]``: pair channels, then pairs of channels."""
    m_w = m_z[:, None]
    if C % BA != 0 or C % BE != 0:
        m_w = m_w & ((o_a < C) & (o_e < C))[None, :]
    # [*, BA * BE]
    return tl.load(weight + o_z[:, None] * (C * C) + (o_a * C + o_e)[None, :], mask=m_w, other=0.0)


@triton.jit
def tile_pairs(i_i, i_j, rows, columns, BI: tl.constexpr, BJ: tl.constexpr):
    """Return rows and columns ``[BI * BJ]`` of a tile's pairs, and the mask of existing ones."""
    o_p = tl.arange(0, BI * BJ)
    o_i = tl.cast(i_i, tl.int64) + o_p // BJ
    o_j = tl.cast(i_j, tl.int64) + o_p % BJ
    return o_i, o_j, (o_i < rows) & (o_j < columns)


@triton.jit
def reciprocal_norm(counts, counts_strides, o_i, o_j, m_p, EPS):
    """Compute one over the number of sequences ``[BI * BJ]`` of pairs, plus EPS."""
    # [BI * BJ]
    b_count = tl.load(counts + o_i * counts_strides[0] + o_j * counts_strides[1], mask=m_p, other=1.0)
    return 1.0 / (b_count + EPS)


@triton.jit(do_not_specialize=SIZES)
def outer_product_mean_forward_kernel(
    x, weight, bias, counts, residual, out, sequences, rows, columns,
    counts_strides, residual_strides, out_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outer product mean: a program owns BI times BJ pairs with all their channels."""
    # Sums become means before they are rounded: float16 holds means wherever it holds the products.
    i_i = tl.program_id(0) // tl.cdiv(columns, BJ) * BI
    i_j = tl.program_id(0) % tl.cdiv(columns, BJ) * BJ
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    o_k = tl.arange(0, BA * BE)
    b_out = tl.zeros([BI * BJ, BZ], tl.float32)
    for i_a in range(0, C, BA):
        for i_e in range(0, C, BE):
            b_products = outer_products(
                x, i_i, i_j, i_a, i_e, sequences, rows, columns, C, BI, BJ, BA, BE, BS, PRECISION
            )
            # Recomputed each time, because registers are scarce in the loops.
            o_i, o_j, m_p = tile_pairs(i_i, i_j, rows, columns, BI, BJ)
            b_scale = reciprocal_norm(counts, counts_strides, o_i, o_j, m_p, EPS)
            b_means = cast(b_products * b_scale[:, None], weight.dtype.element_ty)
            b_w = weights_tile(weight, o_z, m_z, i_a + o_k // BE, i_e + o_k % BE, C, BA, BE)
            b_out = dot(b_means, tl.trans(b_w), PRECISION, b_out)
    o_i, o_j, m_p = tile_pairs(i_i, i_j, rows, columns, BI, BJ)
    b_scale = reciprocal_norm(counts, counts_strides, o_i, o_j, m_p, EPS)
    m_out = m_p[:, None] & m_z[None, :]
    b_bias = tl.load(bias + o_z, mask=m_z, other=0.0).to(tl.float32)
    b_out += b_scale[:, None] * b_bias[None, :]
    if HAS_RESIDUAL:
        p_residual = pair_tile(residual, residual_strides, o_i, o_j, o_z)
        b_out += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
    p_out = pair_tile(out, out_strides, o_i, o_j, o_z)
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_out)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return contiguous ``x [*, S, I, C]`` times its ``mask [*, S, I]``; kernels copy its tiles unchanged."""
    factors = mask.to(x.dtype).unsqueeze(-1)
    # A product has the memory layout of its factors.
    in_order = list(x.stride()) == sorted(x.stride(), reverse=True)
    return (x * factors if in_order else torch.mul(x, factors, out=x.new_empty(x.shape))).contiguous()


class RightSide(NamedTuple):
    """Inputs of ``outer_product_mean`` that all rows of the result share; ``right`` is already times its mask."""

    right: Tensor
    right_mask: Tensor
    weight: Tensor
    bias: Tensor


def forward(
    shared: RightSide, eps: float, out: Tensor, left: Tensor, left_mask: Tensor, residual: Tensor | None
) -> None:
    """Fill ``out``, which may be ``residual``; arguments as of ``outer_product_mean``."""
    if out.numel() == 0:
        return
    right, right_mask, weight, bias = shared
    c, c_z = left.shape[-1], len(bias)
    weight, bias = weight.to(left.dtype).contiguous(), bias.to(left.dtype).contiguous()
    config = configuration("outer_product_mean_forward", left, c_z)
    left = masked(left, left_mask)
    for i in batch_indices(left):
        x = Projections(part(left, i), part(right, i))
        (sequences, rows, _), columns = x.left.shape, right.shape[-2]
        b_out, masks = part(out, i), (part(left_mask, i), part(right_mask, i))
        counts = once(functools.partial(counts_of, *masks), *masks, size=rows * columns, key=counts_of)
        b_residual = b_out if residual is None else part(residual, i)
        programs = triton.cdiv(rows, config.blocks["BI"]) * triton.cdiv(columns, config.blocks["BJ"])
        launch(outer_product_mean_forward_kernel, (programs,))(
            *(x, weight, bias, counts, b_residual, b_out, sequences, rows, columns),
            *(counts.stride(), b_residual.stride(), b_out.stride(), eps),
            C=c,
            CZ=c_z,
            BZ=padded(c_z),
            HAS_RESIDUAL=residual is not None,
            PRECISION=precision(left, config),
            **config.launch,
        )
