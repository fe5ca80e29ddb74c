"""Second half of triangle multiplication in Triton, backward: from the update to the product and the weights."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import (
    PROGRAMS,
    Kernel,
    configuration,
    normalised,
    normalised_backward,
    row_statistics,
    rows_product,
    split_dot,
    splits,
)
from fastfold.kernels.common.triton_math import cast, dot, precision
from fastfold.kernels.ops.triangle_multiplication.triton_factors_fwd import EPS, EXACT, pair_positions


@triton.jit
def gated_output_gradients(
    b_p, p_p, size, b_mean_p, b_rstd_p, b_z, p_z, z_c, b_mean, b_rstd,
    norm_weight, norm_bias, norm_out_weight, norm_out_bias, weight, bias, gate, gate_bias,
    p_grad, grad_c, p_dropout, dropout_c, o_o, m_o, m_m,
    C: tl.constexpr, BC: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr, HAS_DROPOUT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients ``[BM, BO]`` of output projection and gate logits, which it recomputes."""
    KC: tl.constexpr = BK if BK < BC else BC
    KZ: tl.constexpr = BK if BK < BZ else BZ
    b_out = rows_product(
        b_p, p_p, size, b_mean_p, b_rstd_p, norm_out_weight, norm_out_bias, weight + o_o * C, 1, m_m, m_o,
        C, BM, BC, BO, KC, True, SPLIT, PRECISION,
    )  # fmt: skip
    b_out += tl.load(bias + o_o, mask=m_o, other=0.0).to(tl.float32)[None, :]
    b_gate = rows_product(
        b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, gate + o_o * CZ, 1, m_m, m_o,
        CZ, BM, BZ, BO, KZ, True, SPLIT, PRECISION,
    )  # fmt: skip
    b_gate = tl.sigmoid(b_gate + tl.load(gate_bias + o_o, mask=m_o, other=0.0).to(tl.float32)[None, :])
    m_grad = m_m[:, None] & m_o[None, :]
    # [BM, BO]
    b_grad = tl.load(p_grad[:, None] + o_o[None, :] * grad_c, mask=m_grad, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        b_grad *= tl.load(p_dropout[:, None] + o_o[None, :] * dropout_c, mask=m_grad, other=0.0).to(
            tl.float32
        )
    b_grad_out = b_grad * b_gate
    return b_grad_out, b_grad_out * b_out * (1.0 - b_gate)


@triton.jit(do_not_specialize=["n"])
def triangle_output_backward_kernel(
    product,
    z,
    dropout,
    grad,
    grad_x,
    grad_norm_out,
    norm_weight,
    norm_bias,
    norm_out_weight,
    norm_out_bias,
    weight,
    bias,
    gate,
    gate_bias,
    n,
    size,
    z_i,
    z_j,
    z_c,
    dropout_i,
    dropout_j,
    dropout_c,
    grad_i,
    grad_j,
    grad_c,
    grad_x_i,
    grad_x_j,
    grad_x_c,
    EPS,
    C: tl.constexpr,
    BC: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BM: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Puts the gradient of ``product`` in its place, and that of the normalised ``z`` into ``grad_x``.

    Leaves ``[programs, 2, C]`` partial sums for the parameters of the norm of the product.
    """
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_grad_weight = tl.zeros([BC], tl.float32)
    b_grad_bias = tl.zeros([BC], tl.float32)
    for i_m in range(tl.program_id(0), tl.cdiv(size, BM), tl.num_programs(0)):
        o_m, o_i, o_j = pair_positions(i_m, n, BM)
        m_m = o_m < size
        m_p = m_m[:, None] & m_c[None, :]
        p_p = product + o_m
        p_block = p_p[:, None] + o_c.to(tl.int64)[None, :] * size
        # [BM, BC]
        b_p = tl.load(p_block, mask=m_p, other=0.0).to(tl.float32)
        b_mean_p, b_rstd_p = row_statistics(b_p, m_c, C, EPS)
        b_p = normalised(b_p, b_mean_p, b_rstd_p, norm_out_weight, norm_out_bias, o_c, m_c)
        p_z = z + o_i * z_i + o_j * z_j
        m_zz = m_m[:, None] & m_z[None, :]
        # [BM, BZ]
        b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_zz, other=0.0).to(tl.float32)
        b_mean, b_rstd = row_statistics(b_z, m_z, CZ, EPS)
        b_z = normalised(b_z, b_mean, b_rstd, norm_weight, norm_bias, o_z, m_z)
        b_grad_p = tl.zeros([BM, BC], tl.float32)
        b_grad_x = tl.zeros([BM, BZ], tl.float32)
        for i_o in range(0, CZ, BO):
            o_o = i_o + tl.arange(0, BO)
            m_o = o_o < CZ
            b_grad_out, b_grad_gate = gated_output_gradients(
                b_p, p_p, size, b_mean_p, b_rstd_p, b_z, p_z, z_c, b_mean, b_rstd,
                norm_weight, norm_bias, norm_out_weight, norm_out_bias, weight, bias, gate, gate_bias,
                grad + o_i * grad_i + o_j * grad_j, grad_c,
                dropout + o_i * dropout_i + o_j * dropout_j, dropout_c, o_o, m_o, m_m,
                C, BC, CZ, BZ, BM, BO, BK, HAS_DROPOUT, SPLIT, PRECISION,
            )  # fmt: skip
            # [BO, BC]
            b_w = tl.load(
                weight + o_o[:, None] * C + o_c[None, :], mask=m_o[:, None] & m_c[None, :], other=0.0
            )
            b_grad_p += split_dot(b_grad_out, b_w, SPLIT, PRECISION)
            # [BO, BZ]
            b_w = tl.load(
                gate + o_o[:, None] * CZ + o_z[None, :], mask=m_o[:, None] & m_z[None, :], other=0.0
            )
            b_grad_x += split_dot(b_grad_gate, b_w, SPLIT, PRECISION)
        p_grad_x = grad_x + (o_i * grad_x_i + o_j * grad_x_j)[:, None] + o_z[None, :] * grad_x_c
        tl.store(p_grad_x, cast(b_grad_x, grad_x.dtype.element_ty), mask=m_zz)
        # Read again rather than kept in registers through the loop.
        b_p = tl.load(p_block, mask=m_p, other=0.0).to(tl.float32)
        b_grad_bias += tl.sum(b_grad_p, 0)
        b_grad_p, b_scales = normalised_backward(
            b_grad_p, b_p, b_mean_p, b_rstd_p, norm_out_weight, o_c, m_c, C
        )
        b_grad_weight += tl.sum(b_scales, 0)
        tl.store(p_block, cast(b_grad_p, product.dtype.element_ty), mask=m_p)
    p_partial = grad_norm_out + tl.program_id(0) * 2 * C + o_c
    tl.store(p_partial, b_grad_weight, mask=m_c)
    tl.store(p_partial + C, b_grad_bias, mask=m_c)


def switches(c: int, c_z: int, dtype: torch.dtype, has_dropout: bool) -> dict[str, Any]:
    """``tl.constexpr`` arguments of the kernels of this half's gradients, without block sizes and PRECISION."""
    return {
        "C": c,
        "BC": padded(c),
        "CZ": c_z,
        "BZ": padded(c_z),
        "HAS_DROPOUT": has_dropout,
        "SPLIT": dtype != torch.float32,
    }


def output_backward(
    product: Tensor,
    z: Tensor,
    grad: Tensor,
    grad_x: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """Put gradients into ``product [c, R, N]`` and ``grad_x [R, N, c_z]``, and return those of the norm between.

    Args:
        product: What the second normalisation gets; its gradient takes its place.
        z: ``[R, N, c_z]``, rows of one batch element.
        grad: Gradient of the update.
        grad_x: Where that of the normalised ``z`` goes, in the dtype of ``z``.
        dropout: Factors in the shape of ``z``, or None.
        parameters: The arranged ones, of the whole operator.

    Returns:
        Gradients, in float32, of the two parameters of the normalisation of ``product``.
    """
    (c, rows, n), c_z = product.shape, z.shape[-1]
    b_dropout = z if dropout is None else dropout
    config = configuration("triangle_output_backward", z, max(c, c_z))
    programs = min(PROGRAMS, triton.cdiv(rows * n, config.blocks["BM"]))
    partial = z.new_empty(programs, 2, c, dtype=torch.float32)
    triangle_output_backward_kernel[(programs,)](
        product, z, b_dropout, grad, grad_x, partial, *parameters[:2], *parameters[6:], n, rows * n,
        *z.stride(), *b_dropout.stride(), *grad.stride(), *grad_x.stride(), EPS,
        **switches(c, c_z, z.dtype, dropout is not None), PRECISION=precision(z), **config.launch,
    )  # fmt: skip
    return list(partial.sum(0))


@triton.jit(do_not_specialize=["n"])
def triangle_output_weights_kernel(
    product,
    z,
    dropout,
    grad,
    grad_weight,
    grad_gate,
    grad_biases,
    norm_weight,
    norm_bias,
    norm_out_weight,
    norm_out_bias,
    weight,
    bias,
    gate,
    gate_bias,
    n,
    size,
    z_i,
    z_j,
    z_c,
    dropout_i,
    dropout_j,
    dropout_c,
    grad_i,
    grad_j,
    grad_c,
    EPS,
    C: tl.constexpr,
    BC: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BM: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BO rows of output projection and gate, and a share of the positions.

    It leaves its share of their gradients: ``[programs, CZ, C]``, ``[programs, CZ, CZ]`` and ``[programs, 2, CZ]``.
    """
    o_o = tl.program_id(0) * BO + tl.arange(0, BO)
    m_o = o_o < CZ
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_grad_weight = tl.zeros([BO, BC], tl.float32)
    b_grad_gate = tl.zeros([BO, BZ], tl.float32)
    b_grad_bias = tl.zeros([BO], tl.float32)
    b_grad_gate_bias = tl.zeros([BO], tl.float32)
    for i_m in range(tl.program_id(1), tl.cdiv(size, BM), tl.num_programs(1)):
        o_m, o_i, o_j = pair_positions(i_m, n, BM)
        m_m = o_m < size
        p_p = product + o_m
        p_block = p_p[:, None] + o_c.to(tl.int64)[None, :] * size
        # [BM, BC]
        b_p = tl.load(p_block, mask=m_m[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        b_mean_p, b_rstd_p = row_statistics(b_p, m_c, C, EPS)
        b_p = normalised(b_p, b_mean_p, b_rstd_p, norm_out_weight, norm_out_bias, o_c, m_c)
        p_z = z + o_i * z_i + o_j * z_j
        # [BM, BZ]
        b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_m[:, None] & m_z[None, :], other=0.0).to(
            tl.float32
        )
        b_mean, b_rstd = row_statistics(b_z, m_z, CZ, EPS)
        b_z = normalised(b_z, b_mean, b_rstd, norm_weight, norm_bias, o_z, m_z)
        b_out, b_logits = gated_output_gradients(
            b_p, p_p, size, b_mean_p, b_rstd_p, b_z, p_z, z_c, b_mean, b_rstd,
            norm_weight, norm_bias, norm_out_weight, norm_out_bias, weight, bias, gate, gate_bias,
            grad + o_i * grad_i + o_j * grad_j, grad_c,
            dropout + o_i * dropout_i + o_j * dropout_j, dropout_c, o_o, m_o, m_m,
            C, BC, CZ, BZ, BM, BO, BK, HAS_DROPOUT, SPLIT, PRECISION,
        )  # fmt: skip
        b_grad_bias += tl.sum(b_out, 0)
        b_grad_gate_bias += tl.sum(b_logits, 0)
        dtype = weight.dtype.element_ty
        b_grad_weight += dot(tl.trans(cast(b_out, dtype)), cast(b_p, dtype), PRECISION)
        b_grad_gate += dot(tl.trans(cast(b_logits, dtype)), cast(b_z, dtype), PRECISION)
    i_s = tl.program_id(1).to(tl.int64)
    o_w = (i_s * CZ + o_o)[:, None]
    tl.store(grad_weight + o_w * C + o_c[None, :], b_grad_weight, mask=m_o[:, None] & m_c[None, :])
    tl.store(grad_gate + o_w * CZ + o_z[None, :], b_grad_gate, mask=m_o[:, None] & m_z[None, :])
    p_bias = grad_biases + i_s * 2 * CZ + o_o
    tl.store(p_bias, b_grad_bias, mask=m_o)
    tl.store(p_bias + CZ, b_grad_gate_bias, mask=m_o)


def output_weights_backward(
    product: Tensor, z: Tensor, grad: Tensor, dropout: Tensor | None, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients, in float32, of the last four parameters; arguments as of ``output_backward``, which comes after it."""
    (c, rows, n), c_z = product.shape, z.shape[-1]
    b_dropout = z if dropout is None else dropout
    config = configuration("triangle_output_weights", z, max(c, c_z))
    programs = triton.cdiv(c_z, config.blocks["BO"])
    parts = splits(rows * n, config.blocks["BM"], programs)
    partial, partial_gate, partial_bias = (
        z.new_empty(parts, *shape, dtype=torch.float32) for shape in ((c_z, c), (c_z, c_z), (2, c_z))
    )
    triangle_output_weights_kernel[(programs, parts)](
        product, z, b_dropout, grad, partial, partial_gate, partial_bias, *parameters[:2], *parameters[6:],
        n, rows * n, *z.stride(), *b_dropout.stride(), *grad.stride(), EPS,
        **switches(c, c_z, z.dtype, dropout is not None), PRECISION=precision(z), **config.launch,
    )  # fmt: skip
    bias, gate_bias = partial_bias.sum(0)
    return [partial.sum(0), bias, partial_gate.sum(0), gate_bias]


def kernels() -> dict[str, Kernel]:
    """The kernels of this file as they ship."""
    return {
        "triangle_output_backward": Kernel(
            triangle_output_backward_kernel,
            lambda c, dtype: switches(c, c, dtype, True),
            ("size", "z_i", "z_j", "dropout_i", "dropout_j", "grad_i", "grad_j", "grad_x_i", "grad_x_j"),
            ("n",),
            ("z_c", "dropout_c", "grad_c", "grad_x_c"),
            EXACT | {"grad_norm_out"},
        ),
        "triangle_output_weights": Kernel(
            triangle_output_weights_kernel,
            lambda c, dtype: switches(c, c, dtype, True),
            ("size", "z_i", "z_j", "dropout_i", "dropout_j", "grad_i", "grad_j"),
            ("n",),
            ("z_c", "dropout_c", "grad_c"),
            EXACT | {"grad_weight", "grad_gate", "grad_biases"},
        ),
    }
