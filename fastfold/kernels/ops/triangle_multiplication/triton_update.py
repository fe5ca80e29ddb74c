"""Second half of triangle multiplication in Triton: all operations after the product, in registers; and gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalized_rows import (
    PROGRAMS,
    add_sums,
    configuration,
    load_normalized,
    normalized_backward,
    projected,
    row_statistics,
    split_dot,
    splits,
)
from fastfold.kernels.common.triton_math import (
    NO_PTX,
    cast,
    channels_again,
    dot,
    index_again,
    load_again,
    pair_tile,
    precision,
    sigmoid,
)
from fastfold.kernels.ops.triangle_multiplication.params import EPS, UpdateParams
from fastfold.kernels.ops.triangle_multiplication.triton_factors import SIZES, load_pair, pair_positions


@triton.jit
def load_product(product, weights, o_m, m_m, o_c, m_c, size, C, EPS, share):
    """Load and normalise positions ``[BM, BC]`` of ``product [C, size]``; return statistics and pointers ``[BM]`` too.

    A product times a share has the same normalised rows if the epsilon of its variance is multiplied by the share
    squared.
    """
    p_p = product + o_m
    norm = (weights.norm_out_weight, weights.norm_out_bias)
    b_p, b_statistics = load_normalized(
        p_p, o_c.to(tl.int64) * size, norm, o_c, m_m, m_c, C, EPS * share * share
    )
    return b_p, b_statistics, p_p


@triton.jit(do_not_specialize=SIZES)
def triangle_output_kernel(
    product, z, dropout, residual, out, weights, rows, n, width, size,
    z_strides, dropout_strides, residual_strides, out_strides, EPS, share,
    C: tl.constexpr, BC: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the update: a program owns BM positions with all channels."""
    # It reads all of ``z`` at its positions before it writes ``out``.
    o_m, m_m, o_i, o_j, m_pair = pair_positions(tl.program_id(0), size, rows, n, width, BM)
    o_c = tl.arange(0, BC)
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    m_out = m_pair[:, None] & m_z[None, :]
    b_p, b_statistics_p, p_p = load_product(product, weights, o_m, m_m, o_c, o_c < C, size, C, EPS, share)
    norm_out = (weights.norm_out_weight, weights.norm_out_bias)
    b_out = projected(
        b_p, p_p, size, b_statistics_p, norm_out, weights.out_weight, weights.out_bias, o_z, m_m, m_z,
        C, BM, BC, BZ, BK, False, PRECISION,
    )  # fmt: skip
    b_z, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
    norm = (weights.norm_weight, weights.norm_bias)
    b_gate = projected(
        b_z, p_z, z_strides[2], b_statistics, norm, weights.out_gate_weight, weights.out_gate_bias, o_z, m_pair, m_z,
        CZ, BM, BZ, BZ, BK, False, PRECISION,
    )  # fmt: skip
    b_out *= sigmoid(b_gate)
    if HAS_DROPOUT:
        p_dropout = pair_tile(dropout, dropout_strides, o_i, o_j, o_z)
        b_out *= tl.load(p_dropout, mask=m_out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_residual = pair_tile(residual, residual_strides, o_i, o_j, o_z)
        b_out += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
    tl.store(pair_tile(out, out_strides, o_i, o_j, o_z), cast(b_out, out.dtype.element_ty), mask=m_out)


def write_update(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    weights: UpdateParams,
    residual: Tensor | None,
    dropout: Tensor | None,
    share: float = 1.0,
) -> None:
    """Fill ``out [R, N, c_z]``, rows of an element, from ``product [c, R', N']``.

    ``out`` may be ``z`` or ``residual``. ``share`` is the factor that the product was multiplied by. Rows and columns
    past those of ``z`` are left out.
    """
    c, (rows, n, c_z) = len(product), z.shape
    size, width = product.shape[1] * product.shape[2], product.shape[2]
    config = configuration("triangle_output", z, max(c, c_z))
    b_dropout = z if dropout is None else dropout
    b_residual = z if residual is None else residual
    launch(triangle_output_kernel, (triton.cdiv(size, config.blocks["BM"]),))(
        *(product, z, b_dropout, b_residual, out, weights, rows, n, width, size),
        *(z.stride(), b_dropout.stride(), b_residual.stride(), out.stride(), EPS, share),
        C=c,
        BC=padded(c),
        CZ=c_z,
        BZ=padded(c_z),
        HAS_DROPOUT=dropout is not None,
        HAS_RESIDUAL=residual is not None,
        PRECISION=precision(z, config),
        **config.launch,
    )


@triton.jit
def gated_output_gradients(
    b_p, b_statistics_p, p_p, size, b_z, b_statistics, p_z, z_c, weights,
    p_grad, grad_c, p_dropout, dropout_c, o_o, m_o, m_m, m_pair,
    C: tl.constexpr, BC: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr, HAS_DROPOUT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients ``[BM, BO]`` of output projection and gate logits, which are recomputed."""
    norm = (weights.norm_out_weight, weights.norm_out_bias)
    b_out = projected(
        b_p, p_p, size, b_statistics_p, norm, weights.out_weight, weights.out_bias, o_o, m_m, m_o,
        C, BM, BC, BO, BK, SPLIT, PRECISION,
    )  # fmt: skip
    norm = (weights.norm_weight, weights.norm_bias)
    b_gate = projected(
        b_z, p_z, z_c, b_statistics, norm, weights.out_gate_weight, weights.out_gate_bias, o_o, m_pair, m_o,
        CZ, BM, BZ, BO, BK, SPLIT, PRECISION,
    )  # fmt: skip
    b_gate = sigmoid(b_gate)
    m_grad = m_pair[:, None] & m_o[None, :]
    # [BM, BO]
    b_grad = tl.load(p_grad[:, None] + o_o[None, :] * grad_c, mask=m_grad, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        p_factors = p_dropout[:, None] + o_o[None, :] * dropout_c
        b_grad *= tl.load(p_factors, mask=m_grad, other=0.0).to(tl.float32)
    b_grad_out = b_grad * b_gate
    return b_grad_out, b_grad_out * b_out * (1.0 - b_gate)


@triton.jit(do_not_specialize=SIZES)
def triangle_output_backward_kernel(
    product, z, dropout, grad, grad_x, grad_norm_out, weights, rows, n, width, size,
    z_strides, dropout_strides, grad_strides, grad_x_strides, EPS, share,
    C: tl.constexpr, BC: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr, HAS_DROPOUT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Replace ``product`` by its gradient, and write that of the normalised ``z`` to ``grad_x``."""
    # Write partial sums for the parameters of the product's norm to ``grad_norm_out [programs, 2, C]``.
    p_partial = grad_norm_out + tl.program_id(0) * 2 * C
    # Large blocks fill the registers: between them nothing is kept but their index.
    FULL: tl.constexpr = BM * BC >= 8192
    LEAN: tl.constexpr = FULL and not NO_PTX
    for i_m in tl.range(tl.program_id(0), tl.cdiv(size, BM), tl.num_programs(0), disable_licm=LEAN):
        o_m, m_m, o_i, o_j, m_pair = pair_positions(i_m, size, rows, n, width, BM)
        o_c, m_c = channels_again(C, BC)
        o_z, m_z = channels_again(CZ, BZ)
        b_p, b_statistics_p, p_p = load_product(product, weights, o_m, m_m, o_c, m_c, size, C, EPS, share)
        b_z, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
        b_grad_p = tl.zeros([BM, BC], tl.float32)
        b_grad_x = tl.zeros([BM, BZ], tl.float32)
        for i_o in range(0, CZ, BO):
            o_o = i_o + tl.arange(0, BO)
            m_o = o_o < CZ
            b_grad_out, b_grad_gate = gated_output_gradients(
                b_p, b_statistics_p, p_p, size, b_z, b_statistics, p_z, z_strides[2], weights,
                grad + o_i * grad_strides[0] + o_j * grad_strides[1], grad_strides[2],
                dropout + o_i * dropout_strides[0] + o_j * dropout_strides[1], dropout_strides[2],
                o_o, m_o, m_m, m_pair,
                C, BC, CZ, BZ, BM, BO, BK, HAS_DROPOUT, SPLIT, PRECISION,
            )  # fmt: skip
            # [BO, BC]
            p_w = weights.out_weight + o_o[:, None] * C + o_c[None, :]
            b_w = tl.load(p_w, mask=m_o[:, None] & m_c[None, :], other=0.0)
            b_grad_p = split_dot(b_grad_out, b_w, SPLIT, PRECISION, b_grad_p)
            # [BO, BZ]
            p_w = weights.out_gate_weight + o_o[:, None] * CZ + o_z[None, :]
            b_w = tl.load(p_w, mask=m_o[:, None] & m_z[None, :], other=0.0)
            b_grad_x = split_dot(b_grad_gate, b_w, SPLIT, PRECISION, b_grad_x)
        # The sums fill the registers: positions, channels and statistics are computed again.
        o_m, m_m, o_i, o_j, m_pair = pair_positions(index_again(i_m), size, rows, n, width, BM)
        o_c, m_c = channels_again(C, BC)
        o_z, m_z = channels_again(CZ, BZ)
        m_p = m_m[:, None] & m_c[None, :]
        p_grad_x = pair_tile(grad_x, grad_x_strides, o_i, o_j, o_z)
        tl.store(p_grad_x, cast(b_grad_x, grad_x.dtype.element_ty), mask=m_pair[:, None] & m_z[None, :])
        p_block = (product + o_m)[:, None] + o_c.to(tl.int64)[None, :] * size
        b_p = load_again(p_block, m_p).to(tl.float32)
        if FULL:
            b_statistics_p = row_statistics(b_p, m_c, C, EPS * share * share)
        add_sums(p_partial + C + o_c, b_grad_p, m_c, i_m == tl.program_id(0))
        norm = (weights.norm_out_weight, weights.norm_out_bias)
        b_grad_p, b_scales = normalized_backward(b_grad_p, b_p, b_statistics_p, norm, o_c, m_c, C)
        add_sums(p_partial + o_c, b_scales, m_c, i_m == tl.program_id(0))
        tl.store(p_block, cast(b_grad_p * share, product.dtype.element_ty), mask=m_p)


def switches(c: int, z: Tensor, dropout: Tensor | None) -> dict[str, Any]:
    """Return ``tl.constexpr`` arguments of this half's gradient kernels, without block sizes."""
    return {
        "C": c,
        "BC": padded(c),
        "CZ": z.shape[-1],
        "BZ": padded(z.shape[-1]),
        "HAS_DROPOUT": dropout is not None,
    }


def output_backward(
    product: Tensor,
    z: Tensor,
    grad: Tensor,
    grad_x: Tensor,
    dropout: Tensor | None,
    weights: UpdateParams,
    share: float = 1.0,
) -> list[Tensor]:
    """Write gradients to ``product [c, R', N']`` and ``grad_x [R, N, c_z]``; return those of the product's norm.

    The latter are in float32. ``product``, which was multiplied by ``share``, becomes its gradient, zero past rows and
    columns of ``z [R, N, c_z]``, and ``grad_x`` that of the normalised ``z``. ``grad`` and the factors ``dropout`` have
    the shape of ``z``. The weights are contiguous, in the dtypes that kernels read.
    """
    c, (rows, n, c_z) = len(product), z.shape
    size, width = product.shape[1] * product.shape[2], product.shape[2]
    b_dropout = z if dropout is None else dropout
    config = configuration("triangle_output_backward", z, max(c, c_z))
    programs = min(PROGRAMS, triton.cdiv(size, config.blocks["BM"]))
    partial = z.new_empty(programs, 2, c, dtype=torch.float32)
    launch(triangle_output_backward_kernel, (programs,))(
        *(product, z, b_dropout, grad, grad_x, partial, weights, rows, n, width, size),
        *(z.stride(), b_dropout.stride(), grad.stride(), grad_x.stride(), EPS, share),
        SPLIT=z.dtype == torch.bfloat16,
        PRECISION=precision(z, config),
        **switches(c, z, dropout),
        **config.launch,
    )
    return list(partial.sum(0))


@triton.jit(do_not_specialize=SIZES)
def triangle_output_weights_kernel(
    product, z, dropout, grad, grad_weight, grad_gate, grad_biases, weights, rows, n, width, size,
    z_strides, dropout_strides, grad_strides, EPS, share,
    C: tl.constexpr, BC: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr, HAS_DROPOUT: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the weights' gradients."""
    # A program owns BO rows of output projection and gate, and a part of the positions. It writes partial sums
    # ``[programs, CZ, C]``, ``[programs, CZ, CZ]`` and, for the biases, ``[programs, 2, CZ]``.
    AGAIN: tl.constexpr = (
        weights.out_weight.dtype.element_ty != tl.float32
    )  # its products have smaller blocks
    LEAN: tl.constexpr = FULL and AGAIN
    o_o = tl.program_id(0) * BO + tl.arange(0, BO)
    m_o = o_o < CZ
    b_grad_weight = tl.zeros([BO, BC], tl.float32)
    b_grad_gate = tl.zeros([BO, BZ], tl.float32)
    b_grad_bias = tl.zeros([BO], tl.float32)
    b_grad_gate_bias = tl.zeros([BO], tl.float32)
    for i_m in range(tl.program_id(1), tl.cdiv(size, BM), tl.num_programs(1)):
        o_m, m_m, o_i, o_j, m_pair = pair_positions(i_m, size, rows, n, width, BM)
        o_own = index_again(tl.program_id(0), LEAN) * BO + tl.arange(0, BO)
        m_own = o_own < CZ
        o_c, m_c = channels_again(C, BC, AGAIN)
        o_z, m_z = channels_again(CZ, BZ, AGAIN)
        b_p, b_statistics_p, p_p = load_product(product, weights, o_m, m_m, o_c, m_c, size, C, EPS, share)
        b_z, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
        # Where rows and sums fill the registers, positions are computed again, as the output channels are.
        _, _, o_i, o_j, m_pair = pair_positions(index_again(i_m, LEAN), size, rows, n, width, BM)
        b_out, b_logits = gated_output_gradients(
            b_p, b_statistics_p, p_p, size, b_z, b_statistics, p_z, z_strides[2], weights,
            grad + o_i * grad_strides[0] + o_j * grad_strides[1], grad_strides[2],
            dropout + o_i * dropout_strides[0] + o_j * dropout_strides[1], dropout_strides[2],
            o_own, m_own, m_m, m_pair,
            C, BC, CZ, BZ, BM, BO, BK, HAS_DROPOUT, False, PRECISION,
        )  # fmt: skip
        b_grad_bias += tl.sum(b_out, 0)
        b_grad_gate_bias += tl.sum(b_logits, 0)
        dtype = weights.out_weight.dtype.element_ty
        b_grad_weight += dot(tl.trans(cast(b_out, dtype)), cast(b_p, dtype), PRECISION)
        b_grad_gate += dot(tl.trans(cast(b_logits, dtype)), cast(b_z, dtype), PRECISION)
    i_s = tl.program_id(1).to(tl.int64)
    o_w = (i_s * CZ + o_o)[:, None]
    o_c, m_c = channels_again(C, BC, AGAIN)
    o_z, m_z = channels_again(CZ, BZ, AGAIN)
    tl.store(grad_weight + o_w * C + o_c[None, :], b_grad_weight, mask=m_o[:, None] & m_c[None, :])
    tl.store(grad_gate + o_w * CZ + o_z[None, :], b_grad_gate, mask=m_o[:, None] & m_z[None, :])
    p_bias = grad_biases + i_s * 2 * CZ + o_o
    tl.store(p_bias, b_grad_bias, mask=m_o)
    tl.store(p_bias + CZ, b_grad_gate_bias, mask=m_o)


def output_weights_backward(
    product: Tensor,
    z: Tensor,
    grad: Tensor,
    dropout: Tensor | None,
    weights: UpdateParams,
    share: float = 1.0,
) -> list[Tensor]:
    """Return gradients, in float32, of output and gate, each weight before bias.

    Arguments are those of :func:`output_backward`, which must be called afterwards because it overwrites the product.
    """
    c, (rows, n, c_z) = len(product), z.shape
    size, width = product.shape[1] * product.shape[2], product.shape[2]
    b_dropout = z if dropout is None else dropout
    config = configuration("triangle_output_weights", z, max(c, c_z))
    programs = triton.cdiv(c_z, config.blocks["BO"])
    parts = splits(size, config.blocks["BM"], programs)
    partial, partial_gate, partial_bias = (
        z.new_empty(parts, *shape, dtype=torch.float32) for shape in ((c_z, c), (c_z, c_z), (2, c_z))
    )
    launch(triangle_output_weights_kernel, (programs, parts))(
        *(product, z, b_dropout, grad, partial, partial_gate, partial_bias, weights, rows, n, width, size),
        *(z.stride(), b_dropout.stride(), grad.stride(), EPS, share),
        FULL=config.num_warps <= 4,
        PRECISION=precision(z, config),
        **switches(c, z, dropout),
        **config.launch,
    )
    bias, gate_bias = partial_bias.sum(0)
    return [partial.sum(0), bias, partial_gate.sum(0), gate_bias]
