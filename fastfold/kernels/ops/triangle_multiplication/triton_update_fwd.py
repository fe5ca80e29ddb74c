"""Last kernel of triangle multiplication in Triton: everything that follows the product, in registers."""

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
    Kernel,
    configuration,
    normalised,
    row_statistics,
    rows_product,
)
from fastfold.kernels.common.triton_math import cast, precision
from fastfold.kernels.ops.triangle_multiplication.triton_factors_fwd import EPS, EXACT, pair_positions


@triton.jit(do_not_specialize=["n"])
def triangle_output_kernel(
    product,
    z,
    dropout,
    residual,
    out,
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
    residual_i,
    residual_j,
    residual_c,
    out_i,
    out_j,
    out_c,
    EPS,
    C: tl.constexpr,
    BC: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BM positions with all channels: it has read all of ``z`` there before it writes ``out``."""
    KC: tl.constexpr = BK if BK < BC else BC
    KZ: tl.constexpr = BK if BK < BZ else BZ
    o_m, o_i, o_j = pair_positions(tl.program_id(0), n, BM)
    m_m = o_m < size
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    m_out = m_m[:, None] & m_z[None, :]
    p_p = product + o_m
    # [BM, BC]
    p_block = p_p[:, None] + o_c.to(tl.int64)[None, :] * size
    b_p = tl.load(p_block, mask=m_m[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    b_mean_p, b_rstd_p = row_statistics(b_p, m_c, C, EPS)
    b_p = normalised(b_p, b_mean_p, b_rstd_p, norm_out_weight, norm_out_bias, o_c, m_c)
    b_out = rows_product(
        b_p, p_p, size, b_mean_p, b_rstd_p, norm_out_weight, norm_out_bias, weight + o_z * C, 1, m_m, m_z,
        C, BM, BC, BZ, KC, True, False, PRECISION,
    )  # fmt: skip
    b_out += tl.load(bias + o_z, mask=m_z, other=0.0).to(tl.float32)[None, :]
    p_z = z + o_i * z_i + o_j * z_j
    # [BM, BZ]
    b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_out, other=0.0).to(tl.float32)
    b_mean, b_rstd = row_statistics(b_z, m_z, CZ, EPS)
    b_z = normalised(b_z, b_mean, b_rstd, norm_weight, norm_bias, o_z, m_z)
    b_gate = rows_product(
        b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, gate + o_z * CZ, 1, m_m, m_z,
        CZ, BM, BZ, BZ, KZ, True, False, PRECISION,
    )  # fmt: skip
    b_gate += tl.load(gate_bias + o_z, mask=m_z, other=0.0).to(tl.float32)[None, :]
    b_out *= tl.sigmoid(b_gate)
    if HAS_DROPOUT:
        p_dropout = dropout + (o_i * dropout_i + o_j * dropout_j)[:, None] + o_z[None, :] * dropout_c
        b_out *= tl.load(p_dropout, mask=m_out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_residual = residual + (o_i * residual_i + o_j * residual_j)[:, None] + o_z[None, :] * residual_c
        b_out += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
    p_out = out + (o_i * out_i + o_j * out_j)[:, None] + o_z[None, :] * out_c
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_out)


def constants(c: int, dtype: torch.dtype) -> dict[str, Any]:
    """``tl.constexpr`` arguments of a specimen in which the pair and the hidden channels are as many."""
    return {"C": c, "BC": padded(c), "CZ": c, "BZ": padded(c)}


def write_update(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    parameters: Sequence[Tensor],
    residual: Tensor | None,
    dropout: Tensor | None,
) -> None:
    """Fill ``out [R, N, c_z]``, which may be ``z`` or ``residual``, from ``product [c, R, N]``: rows of an element."""
    c, (rows, n, c_z) = len(product), z.shape
    config = configuration("triangle_output", z, max(c, c_z))
    b_dropout = z if dropout is None else dropout
    b_residual = z if residual is None else residual
    triangle_output_kernel[(triton.cdiv(rows * n, config.blocks["BM"]),)](
        product,
        z,
        b_dropout,
        b_residual,
        out,
        *parameters[:2],
        *parameters[6:],
        n,
        rows * n,
        *z.stride(),
        *b_dropout.stride(),
        *b_residual.stride(),
        *out.stride(),
        EPS,
        C=c,
        BC=padded(c),
        CZ=c_z,
        BZ=padded(c_z),
        HAS_DROPOUT=dropout is not None,
        HAS_RESIDUAL=residual is not None,
        PRECISION=precision(z),
        **config.launch,
    )


def kernels() -> dict[str, Kernel]:
    """The kernels of this file as they ship."""
    return {
        "triangle_output": Kernel(
            triangle_output_kernel,
            lambda c, dtype: constants(c, dtype) | {"HAS_DROPOUT": True, "HAS_RESIDUAL": True},
            (
                "size",
                "z_i",
                "z_j",
                "residual_i",
                "residual_j",
                "out_i",
                "out_j",
                "dropout_i",
                "dropout_j",
            ),
            ("n",),
            ("z_c", "residual_c", "out_c", "dropout_c"),
            EXACT,
        ),
    }
