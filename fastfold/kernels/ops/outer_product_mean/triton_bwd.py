"""Outer product mean in Triton, backward: the gradients of the products exist for one tile at a time."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded, part
from fastfold.kernels.common.normalized_rows import configuration, splits
from fastfold.kernels.common.scratch import share_of
from fastfold.kernels.common.triton_math import cast, dot, pair_tile, precision
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams, counts_of
from fastfold.kernels.ops.outer_product_mean.triton_fwd import (
    SIZES,
    Projections,
    columns_pointers,
    masked,
    outer_products,
    reciprocal_norm,
    tile_pairs,
    weights_tile,
)

SHALLOW = 128
"""Maximum number of sequences for the shallow configurations of a side's 16-bit gradients.

A program multiplies the gradients of all its pairs by the weights again for every block of sequences. With many
sequences it owns larger blocks, which few sequences would leave mostly empty."""


@triton.jit
def load_gradients(grad, grad_strides, o_i, o_j, m_p, o_z, m_z, DTYPE: tl.constexpr):
    """Load gradients of pairs ``[BI * BJ, *]`` in the dtype of the other factor, zero past the end."""
    p_grad = pair_tile(grad, grad_strides, o_i, o_j, o_z)
    # [BI * BJ, *]
    return cast(tl.load(p_grad, mask=m_p[:, None] & m_z[None, :], other=0.0), DTYPE)


@triton.jit(do_not_specialize=SIZES)
def outer_product_mean_side_kernel(
    right, left_mask, weight, counts, grad, grad_left, share, sequences, rows, columns,
    left_mask_strides, counts_strides, grad_strides, grad_left_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr, BE: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a side's gradient: a program owns BS sequences of BI columns, and walks over the other side's columns."""
    n_a = tl.cdiv(C, BA)
    i_a = tl.program_id(0) % n_a * BA
    i_i = tl.program_id(0) // n_a * BI
    i_s = tl.program_id(1) * BS
    o_k = tl.arange(0, BA * BE)
    m_s = i_s + tl.arange(0, BS) < sequences
    b_grad = tl.zeros([BS, BI * BA], tl.float32)
    for i_j in range(0, columns, BJ):
        o_i, o_j, m_p = tile_pairs(i_i, i_j, rows, columns, BI, BJ)
        b_scale = reciprocal_norm(counts, counts_strides, o_i, o_j, m_p, EPS) / share
        if right.dtype.element_ty == tl.float16:
            # Pairs without common sequences add nothing, and their factor of one over EPS would overflow.
            b_count = tl.load(counts + o_i * counts_strides[0] + o_j * counts_strides[1], mask=m_p, other=1.0)
            b_scale = tl.where(b_count == 0.0, 0.0, b_scale)
        for i_e in range(0, C, BE):
            b_products = tl.zeros([BI * BJ, BA * BE], tl.float32)
            for i_z in range(0, CZ, BK):
                o_z = i_z + tl.arange(0, BK)
                m_z = o_z < CZ
                b_pairs = load_gradients(grad, grad_strides, o_i, o_j, m_p, o_z, m_z, weight.dtype.element_ty)
                b_w = weights_tile(weight, o_z, m_z, i_a + o_k // BE, i_e + o_k % BE, C, BA, BE)
                b_products = dot(b_pairs, b_w, PRECISION, b_products)
            b_products = tl.reshape(b_products * b_scale[:, None], [BI, BJ, BA, BE])
            b_products = tl.reshape(tl.permute(b_products, (1, 3, 0, 2)), [BJ * BE, BI * BA])
            p_r, m_r = columns_pointers(right, i_s, i_j, i_e, columns, C, BS, BJ, BE)
            # [BS, BJ * BE]
            b_r = tl.load(p_r, mask=m_s[:, None] & m_r[None, :], other=0.0)
            b_grad = dot(b_r, cast(b_products, right.dtype.element_ty), PRECISION, b_grad)
    o_s = i_s.to(tl.int64) + tl.arange(0, BS)
    o_x = tl.arange(0, BI * BA)
    o_i = i_i.to(tl.int64) + o_x // BA
    o_c = i_a + o_x % BA
    m_grad = m_s[:, None] & ((o_i < rows) & (o_c < C))[None, :]
    # [BS, BI * BA]
    p_mask = left_mask + o_s[:, None] * left_mask_strides[0] + (o_i * left_mask_strides[1])[None, :]
    b_grad *= share * tl.load(p_mask, mask=m_grad, other=0.0).to(tl.float32)
    p_grad = grad_left + o_s[:, None] * grad_left_strides[0]
    p_grad += (o_i * grad_left_strides[1] + o_c * grad_left_strides[2])[None, :]
    tl.store(p_grad, cast(b_grad, grad_left.dtype.element_ty), mask=m_grad)


def write_side(
    grad_left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    weight: Tensor,
    counts: Tensor,
    eps: float,
    grad: Tensor,
) -> None:
    """Fill the gradient of the left side of one batch element, from the right one times its mask.

    The channels of ``weight [c_z, c, c]`` are in the order (left, right).
    Products of float32 are exact even if PyTorch's setting allows tf32, because the kernel would spill registers with
    it.
    """
    (sequences, rows, c), columns, c_z = grad_left.shape, right.shape[1], len(weight)
    deep = right.dtype.itemsize == 2 and sequences > SHALLOW
    config = configuration("outer_product_mean_side", right, c_z, "_deep" if deep else "")
    blocks = config.blocks
    grid = (
        triton.cdiv(rows, blocks["BI"]) * triton.cdiv(c, blocks["BA"]),
        triton.cdiv(sequences, blocks["BS"]),
    )
    share = share_of(sequences, right.dtype)
    launch(outer_product_mean_side_kernel, grid)(
        *(right, left_mask, weight, counts, grad, grad_left, share, sequences, rows, columns),
        *(*(x.stride() for x in (left_mask, counts, grad, grad_left)), eps),
        C=c,
        CZ=c_z,
        PRECISION=config.float32,
        **config.launch,
    )


@triton.jit(do_not_specialize=SIZES)
def outer_product_mean_weights_kernel(
    x, counts, grad, grad_weight, grad_bias, sequences, rows, columns, counts_strides, grad_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the weights' gradient: a program owns BA times BE columns and a part of the pairs."""
    # It writes partial sums: ``[programs, CZ, C * C]`` and, for the bias, ``[programs, CZ]``.
    n_e = tl.cdiv(C, BE)
    i_a = tl.program_id(0) // n_e * BA
    i_e = tl.program_id(0) % n_e * BE
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    n_j = tl.cdiv(columns, BJ)
    b_grad_weight = tl.zeros([BZ, BA * BE], tl.float32)
    b_grad_bias = tl.zeros([BZ], tl.float32)
    for i_p in range(tl.program_id(1), tl.cdiv(rows, BI) * n_j, tl.num_programs(1)):
        i_i, i_j = i_p // n_j * BI, i_p % n_j * BJ
        b_products = outer_products(
            x, i_i, i_j, i_a, i_e, sequences, rows, columns, C, BI, BJ, BA, BE, BS, PRECISION
        )
        o_i, o_j, m_p = tile_pairs(i_i, i_j, rows, columns, BI, BJ)
        b_scale = reciprocal_norm(counts, counts_strides, o_i, o_j, m_p, EPS)
        dtype = x.left.dtype.element_ty
        b_pairs = load_gradients(grad, grad_strides, o_i, o_j, m_p, o_z, m_z, dtype)
        b_means = cast(b_products * b_scale[:, None], dtype)
        b_grad_weight = dot(tl.trans(b_pairs), b_means, PRECISION, b_grad_weight)
        if tl.program_id(0) == 0:
            b_grad_bias += tl.sum(b_pairs.to(tl.float32) * b_scale[:, None], 0)
    i_s = tl.program_id(1).to(tl.int64)
    o_k = tl.arange(0, BA * BE)
    o_a, o_e = i_a + o_k // BE, i_e + o_k % BE
    m_k = (o_a < C) & (o_e < C)
    p_weight = grad_weight + (i_s * CZ + o_z)[:, None] * (C * C) + (o_a * C + o_e)[None, :]
    tl.store(p_weight, b_grad_weight, mask=m_z[:, None] & m_k[None, :])
    if tl.program_id(0) == 0:
        tl.store(grad_bias + i_s * CZ + o_z, b_grad_bias, mask=m_z)


def _weights(x: Projections, counts: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients ``[c_z, c * c]`` and ``[c_z]`` of weights and bias from one batch element, in float32."""
    left = x.left
    (sequences, rows, c), columns, c_z = left.shape, x.right.shape[1], grad.shape[-1]
    config = configuration("outer_product_mean_weights", left, c_z)
    blocks = config.blocks
    programs = triton.cdiv(c, blocks["BA"]) * triton.cdiv(c, blocks["BE"])
    tiles = triton.cdiv(rows, blocks["BI"]) * triton.cdiv(columns, blocks["BJ"])
    parts = splits(tiles, 1, programs)
    partial = left.new_empty(parts, c_z, c * c, dtype=torch.float32)
    partial_bias = left.new_empty(parts, c_z, dtype=torch.float32)
    launch(outer_product_mean_weights_kernel, (programs, parts))(
        *(x, counts, grad, partial, partial_bias, sequences, rows, columns),
        *(counts.stride(), grad.stride(), eps),
        C=c,
        CZ=c_z,
        BZ=padded(c_z),
        PRECISION=precision(left, config),
        **config.launch,
    )
    return partial.sum(0), partial_bias.sum(0)


def backward(grad: Tensor, inputs: OuterProductParams, eps: float, needed: Collection[str]) -> list[Tensor]:
    """Return gradients of ``left``, ``right``, ``weight`` and ``bias``, the last two in float32.

    Gradients that are not ``needed`` have any content.
    """
    left, right, left_mask, right_mask, weight, bias = inputs
    c = left.shape[-1]
    weights = weight.to(left.dtype).reshape(-1, c, c)
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in (weight, bias)]
    if grad.numel() == 0:
        return [grad_left.zero_(), grad_right.zero_(), *totals]
    for i in itertools.product(*map(range, left.shape[:-3])):
        masks = part(left_mask, i), part(right_mask, i)
        x = Projections(masked(part(left, i), masks[0]), masked(part(right, i), masks[1]))
        counts, b_grad = counts_of(*masks), part(grad, i)
        if "left" in needed:
            write_side(part(grad_left, i), x.right, masks[0], weights.contiguous(), counts, eps, b_grad)
        if "right" in needed:
            transposed = weights.mT.contiguous()
            others = (counts.t(), eps, b_grad.transpose(0, 1))
            write_side(part(grad_right, i), x.left, masks[1], transposed, *others)
        if "weight" in needed or "bias" in needed:
            for total, share in zip(totals, _weights(x, counts, eps, b_grad), strict=True):
                total += share
    return [grad_left, grad_right, *totals]
