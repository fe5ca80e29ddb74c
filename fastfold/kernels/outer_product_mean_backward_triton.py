"""Outer product mean in Triton, backward: the gradients of the products exist for one tile at a time as well."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels import outer_product_mean_side_kernel
from fastfold.kernels.ahead_of_time import Specimen
from fastfold.kernels.layout import padded
from fastfold.kernels.normalised_rows import Kernel, configuration, specimens_of, splits
from fastfold.kernels.outer_product_mean_side_kernel import scaled_gradients, write_side
from fastfold.kernels.outer_product_mean_torch import norm_of
from fastfold.kernels.outer_product_mean_triton import OUTER_CHANNELS, outer_products
from fastfold.kernels.triton_arithmetic import cast, dot, precision


@triton.jit(do_not_specialize=["sequences", "rows", "columns"])
def outer_product_mean_weights_kernel(
    left,
    right,
    left_mask,
    right_mask,
    norm,
    grad,
    grad_weight,
    grad_bias,
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
    norm_i,
    norm_j,
    grad_i,
    grad_j,
    grad_c,
    C: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BA: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
            left, right, left_mask, right_mask, l_s, l_i, l_c, r_s, r_j, r_c, lm_s, lm_i, rm_s, rm_j,
            i_i, i_j, i_a, i_e, sequences, rows, columns, C, BI, BJ, BA, BE, BS, PRECISION,
        )  # fmt: skip
        b_sums = scaled_gradients(
            grad, norm, grad_i, grad_j, grad_c, norm_i, norm_j, i_i, i_j, o_z, m_z, rows, columns, BI, BJ
        )
        b_grad_bias += tl.sum(b_sums, 0)
        dtype = left.dtype.element_ty
        b_grad_weight += dot(tl.trans(cast(b_sums, dtype)), cast(b_products, dtype), PRECISION)
    i_s = tl.program_id(1).to(tl.int64)
    o_k = tl.arange(0, BA * BE)
    o_a, o_e = i_a + o_k // BE, i_e + o_k % BE
    m_k = (o_a < C) & (o_e < C)
    p_weight = grad_weight + (i_s * CZ + o_z)[:, None] * (C * C) + (o_a * C + o_e)[None, :]
    tl.store(p_weight, b_grad_weight, mask=m_z[:, None] & m_k[None, :])
    if tl.program_id(0) == 0:
        tl.store(grad_bias + i_s * CZ + o_z, b_grad_bias, mask=m_z)


def _weights(
    left: Tensor, right: Tensor, masks: tuple[Tensor, Tensor], norm: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients ``[c_z, c * c]`` and ``[c_z]`` of weights and bias from one batch element, in float32."""
    (sequences, rows, c), columns, c_z = left.shape, right.shape[1], grad.shape[-1]
    config = configuration("outer_product_mean_weights", left, c_z)
    blocks = config.blocks
    programs = triton.cdiv(c, blocks["BA"]) * triton.cdiv(c, blocks["BE"])
    tiles = triton.cdiv(rows, blocks["BI"]) * triton.cdiv(columns, blocks["BJ"])
    parts = splits(tiles, 1, programs)
    partial = left.new_empty(parts, c_z, c * c, dtype=torch.float32)
    partial_bias = left.new_empty(parts, c_z, dtype=torch.float32)
    outer_product_mean_weights_kernel[(programs, parts)](
        left, right, *masks, norm, grad, partial, partial_bias, sequences, rows, columns, *left.stride(),
        *right.stride(), *masks[0].stride(), *masks[1].stride(), *norm.stride(), *grad.stride(),
        C=c, CZ=c_z, BZ=padded(c_z), PRECISION=precision(left), **config.launch,
    )  # fmt: skip
    return partial.sum(0), partial_bias.sum(0)


def backward(
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of ``left``, ``right``, ``weight`` and ``bias``, of the last two in float32; any if not needed."""
    c = left.shape[-1]
    weights = weight.to(left.dtype).reshape(-1, c, c)
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in (weight, bias)]
    if grad.numel() == 0:
        return [grad_left.zero_(), grad_right.zero_(), *totals]
    for i in itertools.product(*map(range, left.shape[:-3])):
        masks = (left_mask[i], right_mask[i])
        norm = norm_of(*masks, eps)
        if needs[0]:
            write_side(grad_left[i], right[i], masks, weights.contiguous(), norm, grad[i])
        if needs[1]:
            turned = weights.mT.contiguous()
            write_side(grad_right[i], left[i], masks[::-1], turned, norm.t(), grad[i].transpose(0, 1))
        if needs[2] or needs[3]:
            for total, part in zip(totals, _weights(left[i], right[i], masks, norm, grad[i]), strict=True):
                total += part
    return [grad_left, grad_right, *totals]


def specimens() -> list[Specimen]:
    """Every kernel in every dtype and configuration that ships."""
    weights = Kernel(
        outer_product_mean_weights_kernel,
        lambda c, dtype: {"C": OUTER_CHANNELS, "CZ": c, "BZ": padded(c)},
        ("l_s", "l_i", "r_s", "r_j", "grad_i", "grad_j"),
        ("sequences", "rows", "columns", "lm_s", "rm_s", "norm_i"),
        ("l_c", "r_c", "lm_i", "rm_j", "norm_j", "grad_c"),
        {"norm", "grad_weight", "grad_bias"},
    )
    return specimens_of(outer_product_mean_side_kernel.kernels() | {"outer_product_mean_weights": weights})
