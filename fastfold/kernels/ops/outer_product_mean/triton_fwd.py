"""Outer product mean in Triton: products of two columns exist for one tile of pairs and channels, in registers."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import KernelVariant, NewTensor, recorded_variants
from fastfold.kernels.common.layout import padded, part
from fastfold.kernels.common.normalised_rows import WIDTHS, configuration
from fastfold.kernels.common.scratch import share_of
from fastfold.kernels.common.triton_math import cast, dot, pair_tile, precision
from fastfold.kernels.ops.outer_product_mean.eager import (
    OuterProductParams,
    batch_indices,
    norm_of,
)

OUTER_CHANNELS = 32
"""Channels of a column in the networks that configurations ship for."""

SIZES = ["sequences", "rows", "columns"]
"""Sizes that no kernel is specialised on."""


class Projections(NamedTuple):
    """Both projections ``[S, I, C]``, ``[S, J, C]`` and their masks ``[S, I]``, ``[S, J]``: tensors, or strides."""

    left: Any
    right: Any
    left_mask: Any
    right_mask: Any

    @property
    def strides(self) -> Projections:
        """Strides of the tensors."""
        return Projections(*(x.stride() for x in self))


@triton.jit
def shared_out(b_x, share, DTYPE: tl.constexpr):
    """Sums ``b_x`` in another dtype, times ``share`` if that is float16, which does not hold them otherwise."""
    if tl.float16 == DTYPE:
        b_x *= share
    return cast(b_x, DTYPE)


@triton.jit
def masked_columns(
    x, mask, x_strides, mask_strides, i_s, i_i, i_c, sequences, columns,
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
    p_x = x + o_s[:, None] * x_strides[0] + (o_i * x_strides[1] + o_c * x_strides[2])[None, :]
    b_x = tl.load(p_x, mask=m_s[:, None] & (m_i & (o_c < C))[None, :], other=0.0)
    # [BS, BI * BC]
    p_mask = mask + o_s[:, None] * mask_strides[0] + (o_i * mask_strides[1])[None, :]
    b_mask = tl.load(p_mask, mask=m_s[:, None] & m_i[None, :], other=0.0)
    return cast(b_x.to(tl.float32) * b_mask.to(tl.float32), x.dtype.element_ty)


@triton.jit
def outer_products(
    x, strides, i_i, i_j, i_a, i_e, sequences, rows, columns,
    C: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over the sequences ``[BI * BJ, BA * BE]``: pairs of columns, and pairs of their channels."""
    b_sum = tl.zeros([BI * BA, BJ * BE], tl.float32)
    for i_s in range(0, sequences, BS):
        b_l = masked_columns(
            x.left, x.left_mask, strides.left, strides.left_mask, i_s, i_i, i_a, sequences, rows,
            C, BS, BI, BA,
        )  # fmt: skip
        b_r = masked_columns(
            x.right, x.right_mask, strides.right, strides.right_mask, i_s, i_j, i_e, sequences, columns,
            C, BS, BJ, BE,
        )  # fmt: skip
        b_sum += dot(tl.trans(b_l), b_r, PRECISION)
    b_sum = tl.permute(tl.reshape(b_sum, [BI, BA, BJ, BE]), (0, 2, 1, 3))
    return tl.reshape(b_sum, [BI * BJ, BA * BE])


@triton.jit(do_not_specialize=SIZES)
def outer_product_mean_forward_kernel(
    x, weight, bias, norm, residual, out, share, sequences, rows, columns, strides, residual_strides, out_strides,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
                x, strides, i_i, i_j, i_a, i_e, sequences, rows, columns, C, BI, BJ, BA, BE, BS, PRECISION
            )
            o_a, o_e = i_a + o_k // BE, i_e + o_k % BE
            m_k = (o_a < C) & (o_e < C)
            # [BA * BE, BZ]
            p_w = weight + (o_a * C + o_e)[:, None] + o_z[None, :] * (C * C)
            b_w = tl.load(p_w, mask=m_k[:, None] & m_z[None, :], other=0.0)
            b_out += dot(shared_out(b_products, share, weight.dtype.element_ty), b_w, PRECISION)
    o_p = tl.arange(0, BI * BJ)
    o_i = tl.cast(i_i, tl.int64) + o_p // BJ
    o_j = tl.cast(i_j, tl.int64) + o_p % BJ
    m_p = (o_i < rows) & (o_j < columns)
    m_out = m_p[:, None] & m_z[None, :]
    # [BI * BJ]
    b_norm = tl.load(norm + o_i * columns + o_j, mask=m_p, other=1.0)
    b_out = b_out * (1.0 / share) + tl.load(bias + o_z, mask=m_z, other=0.0).to(tl.float32)[None, :]
    b_out = b_out / b_norm[:, None]
    if HAS_RESIDUAL:
        p_residual = pair_tile(residual, residual_strides, o_i, o_j, o_z)
        b_out += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
    p_out = pair_tile(out, out_strides, o_i, o_j, o_z)
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_out)


class RightSide(NamedTuple):
    """What all rows of the result share, as of ``outer_product_mean``."""

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
    share = share_of(left.shape[-3], left.dtype)
    for i in batch_indices(left):
        x = Projections._make(part(each, i) for each in (left, right, left_mask, right_mask))
        (sequences, rows, _), columns = x.left.shape, right.shape[-2]
        b_out = part(out, i)
        b_residual = b_out if residual is None else part(residual, i)
        programs = triton.cdiv(rows, config.blocks["BI"]) * triton.cdiv(columns, config.blocks["BJ"])
        outer_product_mean_forward_kernel[(programs,)](
            *(x, weight, bias, norm_of(x.left_mask, x.right_mask, eps), b_residual, b_out),
            *(share, sequences, rows, columns, x.strides, b_residual.stride(), b_out.stride()),
            C=c,
            CZ=c_z,
            BZ=padded(c_z),
            HAS_RESIDUAL=residual is not None,
            PRECISION=precision(left),
            **config.launch,
        )


def example(new: NewTensor, c_z: int) -> tuple[OuterProductParams, Tensor]:
    """Inputs and result with ``c_z`` channels, of which only the shapes count; a mask's rows are not aligned."""
    x, mask, weight = new(32, 20, OUTER_CHANNELS), new(32, 20), new(c_z, OUTER_CHANNELS**2)
    return OuterProductParams(x, x, mask, mask, weight, new(c_z)), new(20, 20, c_z)


def variants() -> list[KernelVariant]:
    """The kernel in every dtype and configuration that ships."""

    def launch(new: NewTensor, c_z: int) -> None:
        x, pair = example(new, c_z)
        forward(RightSide(x.right, *x[3:]), 1e-3, pair, x.left, x.left_mask, pair)

    return recorded_variants(launch, "C", WIDTHS)
