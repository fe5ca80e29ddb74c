"""Last kernel of triangle multiplication in Triton: all operations after the product, in registers."""

# Arguments of kernels are untyped.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import KernelVariant, NewTensor, recorded_variants
from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import WIDTHS, configuration, load_normalised, projected
from fastfold.kernels.common.triton_math import cast, pair_tile, precision, sigmoid
from fastfold.kernels.ops.triangle_multiplication.params import EPS, UpdateParams
from fastfold.kernels.ops.triangle_multiplication.triton_factors_fwd import SIZES, load_pair, pair_positions


@triton.jit
def load_product(product, weights, o_m, m_m, o_c, m_c, size, C, EPS, share):
    """Load and normalise positions ``[BM, BC]`` of ``product [C, size]``; return statistics and pointers ``[BM]`` too.

    A product times a share has the same normalised rows if the epsilon of its variance is multiplied by the share
    squared.
    """
    p_p = product + o_m
    norm = (weights.norm_out_weight, weights.norm_out_bias)
    b_p, b_statistics = load_normalised(
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
    """Compute the update: a program owns BM positions with all channels.

    It reads all of ``z`` at its positions before it writes ``out``.
    """
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


def example_parameters(new: NewTensor, c: int) -> UpdateParams:
    """Return parameters with ``c`` channels of the pair and hidden ones; only their shapes count."""
    norm, weight, bias = new(c, dtype=torch.float32), new(c, c), new(c)
    return UpdateParams(norm, norm, norm, norm, weight, bias, weight, bias)


def variants() -> list[KernelVariant]:
    """Record the kernel in every dtype and shipped configuration."""

    def launch(new: NewTensor, c: int) -> None:
        z = new(16, 16, c)
        write_update(z, new(c, 16, 16), z, example_parameters(new, c), z, z)

    return recorded_variants(launch, "C", WIDTHS)
