"""Gradients of the weights of triangle multiplication's second half: output projection and gate."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.normalised_rows import (
    Kernel,
    configuration,
    normalised,
    row_statistics,
    splits,
)
from fastfold.kernels.triangle_output_gradient_kernels import gated_output_gradients, switches
from fastfold.kernels.triangle_projection_kernels import EPS, EXACT, pair_positions
from fastfold.kernels.triton_arithmetic import cast, dot, precision


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
    """The kernel of this file as it ships."""
    return {
        "triangle_output_weights": Kernel(
            triangle_output_weights_kernel,
            lambda c, dtype: switches(c, c, dtype, True),
            ("size", "z_i", "z_j", "dropout_i", "dropout_j", "grad_i", "grad_j"),
            ("n",),
            ("z_c", "dropout_c", "grad_c"),
            EXACT | {"grad_weight", "grad_gate", "grad_biases"},
        )
    }
