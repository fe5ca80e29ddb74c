"""Outer product mean in Triton, backward: the gradients of the products exist for one tile at a time as well."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import KernelVariant, NewTensor, recorded_variants
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import WIDTHS, configuration, splits
from fastfold.kernels.common.scratch import share_of
from fastfold.kernels.common.triton_math import cast, dot, pair_tile, precision
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams, norm_of
from fastfold.kernels.ops.outer_product_mean.triton_fwd import (
    SIZES,
    Projections,
    example,
    masked_columns,
    outer_products,
    shared_out,
)


@triton.jit
def scaled_gradients(
    grad,
    norm,
    grad_strides,
    norm_strides,
    i_i,
    i_j,
    o_z,
    m_z,
    rows,
    columns,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    """Gradients ``[BI * BJ, BZ]``, in float32, of the sums before they are divided; zero past the end."""
    o_p = tl.arange(0, BI * BJ)
    o_i = tl.cast(i_i, tl.int64) + o_p // BJ
    o_j = tl.cast(i_j, tl.int64) + o_p % BJ
    m_p = (o_i < rows) & (o_j < columns)
    # [BI * BJ, BZ]
    p_grad = pair_tile(grad, grad_strides, o_i, o_j, o_z)
    b_grad = tl.load(p_grad, mask=m_p[:, None] & m_z[None, :], other=0.0).to(tl.float32)
    # [BI * BJ]
    b_norm = tl.load(norm + o_i * norm_strides[0] + o_j * norm_strides[1], mask=m_p, other=1.0)
    return b_grad / b_norm[:, None]


@triton.jit(do_not_specialize=SIZES)
def outer_product_mean_side_kernel(
    right, left_mask, right_mask, weight, norm, grad, grad_left, share, sequences, rows, columns,
    right_strides, left_mask_strides, right_mask_strides, norm_strides, grad_strides, grad_left_strides,
    C: tl.constexpr, CZ: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr, BE: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one side: a program owns BS sequences of BI columns with BA channels, and walks over the other."""
    n_a = tl.cdiv(C, BA)
    i_a = tl.program_id(0) % n_a * BA
    i_i = tl.program_id(0) // n_a * BI
    i_s = tl.program_id(1) * BS
    o_k = tl.arange(0, BA * BE)
    o_a = i_a + o_k // BE
    b_grad = tl.zeros([BS, BI * BA], tl.float32)
    for i_j in range(0, columns, BJ):
        for i_e in range(0, C, BE):
            o_e = i_e + o_k % BE
            m_k = (o_a < C) & (o_e < C)
            b_products = tl.zeros([BI * BJ, BA * BE], tl.float32)
            for i_z in range(0, CZ, BK):
                o_z = i_z + tl.arange(0, BK)
                m_z = o_z < CZ
                b_sums = scaled_gradients(
                    grad, norm, grad_strides, norm_strides, i_i, i_j, o_z, m_z, rows, columns, BI, BJ
                )
                # [BK, BA * BE]
                p_w = weight + o_z[:, None] * (C * C) + (o_a * C + o_e)[None, :]
                b_w = tl.load(p_w, mask=m_z[:, None] & m_k[None, :], other=0.0)
                b_products += dot(shared_out(b_sums, 1.0 / share, weight.dtype.element_ty), b_w, PRECISION)
            b_products = tl.permute(tl.reshape(b_products, [BI, BJ, BA, BE]), (1, 3, 0, 2))
            b_products = cast(tl.reshape(b_products, [BJ * BE, BI * BA]), right.dtype.element_ty)
            b_r = masked_columns(
                right, right_mask, right_strides, right_mask_strides, i_s, i_j, i_e, sequences, columns,
                C, BS, BJ, BE,
            )  # fmt: skip
            b_grad += dot(b_r, b_products, PRECISION)
    o_s = i_s.to(tl.int64) + tl.arange(0, BS)
    o_x = tl.arange(0, BI * BA)
    o_i = i_i.to(tl.int64) + o_x // BA
    o_c = i_a + o_x % BA
    m_grad = (o_s < sequences)[:, None] & ((o_i < rows) & (o_c < C))[None, :]
    # [BS, BI * BA]
    p_mask = left_mask + o_s[:, None] * left_mask_strides[0] + (o_i * left_mask_strides[1])[None, :]
    b_grad *= share * tl.load(p_mask, mask=m_grad, other=0.0).to(tl.float32)
    p_grad = grad_left + o_s[:, None] * grad_left_strides[0]
    p_grad += (o_i * grad_left_strides[1] + o_c * grad_left_strides[2])[None, :]
    tl.store(p_grad, cast(b_grad, grad_left.dtype.element_ty), mask=m_grad)


def write_side(
    grad_left: Tensor, right: Tensor, masks: tuple[Tensor, Tensor], weight: Tensor, norm: Tensor, grad: Tensor
) -> None:
    """Fill the gradient of the left side of one batch element; ``weight [c_z, c, c]`` in the order (left, right).

    Products of float32 are exact even where PyTorch's setting allows tf32, with which the kernel would spill registers.
    """
    (sequences, rows, c), columns, c_z = grad_left.shape, right.shape[1], len(weight)
    config = configuration("outer_product_mean_side", right, c_z)
    blocks = config.blocks
    grid = (
        triton.cdiv(rows, blocks["BI"]) * triton.cdiv(c, blocks["BA"]),
        triton.cdiv(sequences, blocks["BS"]),
    )
    share = share_of(sequences, right.dtype)
    outer_product_mean_side_kernel[grid](
        *(right, *masks, weight, norm, grad, grad_left, share, sequences, rows, columns),
        *(x.stride() for x in (right, *masks, norm, grad, grad_left)),
        C=c,
        CZ=c_z,
        PRECISION="ieee",
        **config.launch,
    )


@triton.jit(do_not_specialize=SIZES)
def outer_product_mean_weights_kernel(
    x, norm, grad, grad_weight, grad_bias, share, sequences, rows, columns, strides, norm_strides, grad_strides,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BA: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns BA times BE columns of the weights and a share of the pairs.

    It leaves its share of their gradients: ``[programs, CZ, C * C]`` and, of the bias, ``[programs, CZ]``.
    """
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
            x, strides, i_i, i_j, i_a, i_e, sequences, rows, columns, C, BI, BJ, BA, BE, BS, PRECISION
        )
        b_sums = scaled_gradients(
            grad, norm, grad_strides, norm_strides, i_i, i_j, o_z, m_z, rows, columns, BI, BJ
        )
        b_grad_bias += tl.sum(b_sums, 0)
        dtype = x.left.dtype.element_ty
        b_sums, b_products = shared_out(b_sums, 1.0 / share, dtype), shared_out(b_products, share, dtype)
        b_grad_weight += dot(tl.trans(b_sums), b_products, PRECISION)
    i_s = tl.program_id(1).to(tl.int64)
    o_k = tl.arange(0, BA * BE)
    o_a, o_e = i_a + o_k // BE, i_e + o_k % BE
    m_k = (o_a < C) & (o_e < C)
    p_weight = grad_weight + (i_s * CZ + o_z)[:, None] * (C * C) + (o_a * C + o_e)[None, :]
    tl.store(p_weight, b_grad_weight, mask=m_z[:, None] & m_k[None, :])
    if tl.program_id(0) == 0:
        tl.store(grad_bias + i_s * CZ + o_z, b_grad_bias, mask=m_z)


def _weights(x: Projections, norm: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients ``[c_z, c * c]`` and ``[c_z]`` of weights and bias from one batch element, in float32."""
    left = x.left
    (sequences, rows, c), columns, c_z = left.shape, x.right.shape[1], grad.shape[-1]
    config = configuration("outer_product_mean_weights", left, c_z)
    blocks = config.blocks
    programs = triton.cdiv(c, blocks["BA"]) * triton.cdiv(c, blocks["BE"])
    tiles = triton.cdiv(rows, blocks["BI"]) * triton.cdiv(columns, blocks["BJ"])
    parts = splits(tiles, 1, programs)
    partial = left.new_empty(parts, c_z, c * c, dtype=torch.float32)
    partial_bias = left.new_empty(parts, c_z, dtype=torch.float32)
    outer_product_mean_weights_kernel[(programs, parts)](
        *(x, norm, grad, partial, partial_bias, share_of(sequences, left.dtype), sequences, rows, columns),
        *(x.strides, norm.stride(), grad.stride()),
        C=c,
        CZ=c_z,
        BZ=padded(c_z),
        PRECISION=precision(left),
        **config.launch,
    )
    return partial.sum(0), partial_bias.sum(0)


def backward(grad: Tensor, inputs: OuterProductParams, eps: float, needed: Collection[str]) -> list[Tensor]:
    """Gradients of ``left``, ``right``, ``weight`` and ``bias``, of the last two in float32; any if not ``needed``."""
    left, right, left_mask, right_mask, weight, bias = inputs
    c = left.shape[-1]
    weights = weight.to(left.dtype).reshape(-1, c, c)
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in (weight, bias)]
    if grad.numel() == 0:
        return [grad_left.zero_(), grad_right.zero_(), *totals]
    for i in itertools.product(*map(range, left.shape[:-3])):
        x = Projections(left[i], right[i], left_mask[i], right_mask[i])
        masks = (x.left_mask, x.right_mask)
        norm = norm_of(*masks, eps)
        if "left" in needed:
            write_side(grad_left[i], right[i], masks, weights.contiguous(), norm, grad[i])
        if "right" in needed:
            transposed = weights.mT.contiguous()
            write_side(grad_right[i], left[i], masks[::-1], transposed, norm.t(), grad[i].transpose(0, 1))
        if "weight" in needed or "bias" in needed:
            for total, part in zip(totals, _weights(x, norm, grad[i]), strict=True):
                total += part
    return [grad_left, grad_right, *totals]


def variants() -> list[KernelVariant]:
    """Both kernels in every dtype and configuration that ships."""

    def launch(new: NewTensor, c_z: int) -> None:
        x, pair = example(new, c_z)
        backward(pair, x, 1e-3, ("left", "weight"))

    return recorded_variants(launch, "C", WIDTHS)
