"""Gradients of the weights of triangle multiplication's first half: projection and gate."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.layout import padded
from fastfold.kernels.normalised_rows import (
    Kernel,
    configuration,
    normalised,
    row_statistics,
    splits,
)
from fastfold.kernels.triangle_projection_gradient_kernels import gated_side_gradients
from fastfold.kernels.triangle_projection_kernels import EPS, EXACT, pair_positions
from fastfold.kernels.triton_arithmetic import cast, dot, precision


@triton.jit(do_not_specialize=["n"])
def triangle_project_weights_kernel(
    grad_sides,
    z,
    mask,
    grad_proj,
    grad_gate,
    grad_biases,
    norm_weight,
    norm_bias,
    proj,
    proj_bias,
    gate,
    gate_bias,
    n,
    size,
    z_i,
    z_j,
    z_c,
    mask_i,
    mask_j,
    EPS,
    C: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BH rows of projection and gate, and a share of the positions.

    It leaves its share of their gradients: ``[programs, 2 C, CZ]`` each and ``[programs, 2, 2 C]`` for the biases.
    """
    o_h = tl.program_id(0) * BH + tl.arange(0, BH)
    m_h = o_h < 2 * C
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_grad_proj = tl.zeros([BH, BZ], tl.float32)
    b_grad_gate = tl.zeros([BH, BZ], tl.float32)
    b_grad_bias = tl.zeros([BH], tl.float32)
    b_grad_gate_bias = tl.zeros([BH], tl.float32)
    for i_m in range(tl.program_id(1), tl.cdiv(size, BM), tl.num_programs(1)):
        o_m, o_i, o_j = pair_positions(i_m, n, BM)
        m_m = o_m < size
        p_z = z + o_i * z_i + o_j * z_j
        # [BM, BZ]
        b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_m[:, None] & m_z[None, :], other=0.0).to(
            tl.float32
        )
        b_mean, b_rstd = row_statistics(b_z, m_z, CZ, EPS)
        b_z = normalised(b_z, b_mean, b_rstd, norm_weight, norm_bias, o_z, m_z)
        # [BM]
        b_mask = tl.load(mask + o_i * mask_i + o_j * mask_j, mask=m_m, other=0.0).to(tl.float32)
        b_side, b_logits = gated_side_gradients(
            b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, proj, proj_bias, gate, gate_bias,
            grad_sides + o_m, size, b_mask, o_h, m_h, m_m, CZ, BZ, BM, BH, BK, SPLIT, PRECISION,
        )  # fmt: skip
        b_grad_bias += tl.sum(b_side, 0)
        b_grad_gate_bias += tl.sum(b_logits, 0)
        dtype = proj.dtype.element_ty
        b_x = cast(b_z, dtype)
        b_grad_proj += dot(tl.trans(cast(b_side, dtype)), b_x, PRECISION)
        b_grad_gate += dot(tl.trans(cast(b_logits, dtype)), b_x, PRECISION)
    i_s = tl.program_id(1).to(tl.int64)
    o_w = (i_s * 2 * C + o_h)[:, None] * CZ + o_z[None, :]
    m_w = m_h[:, None] & m_z[None, :]
    tl.store(grad_proj + o_w, b_grad_proj, mask=m_w)
    tl.store(grad_gate + o_w, b_grad_gate, mask=m_w)
    p_bias = grad_biases + i_s * 4 * C + o_h
    tl.store(p_bias, b_grad_bias, mask=m_h)
    tl.store(p_bias + 2 * C, b_grad_gate_bias, mask=m_h)


def projection_weights_backward(
    grad_sides: Tensor, z: Tensor, mask: Tensor, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients, in float32, of the third to sixth parameter; arguments as of ``projection_backward``."""
    rows, n, c_z = z.shape
    c = len(grad_sides) // 2
    config = configuration("triangle_project_weights", z, c_z)
    programs = triton.cdiv(2 * c, config.blocks["BH"])
    parts = splits(rows * n, config.blocks["BM"], programs)
    partial, partial_gate = z.new_empty(2, parts, 2 * c, c_z, dtype=torch.float32)
    partial_bias = z.new_empty(parts, 2, 2 * c, dtype=torch.float32)
    triangle_project_weights_kernel[(programs, parts)](
        grad_sides, z, mask, partial, partial_gate, partial_bias, *parameters[:6], n, rows * n, *z.stride(),
        *mask.stride(), EPS, C=c, CZ=c_z, BZ=padded(c_z), SPLIT=z.dtype != torch.float32,
        PRECISION=precision(z), **config.launch,
    )  # fmt: skip
    bias, gate_bias = partial_bias.sum(0)
    return [partial.sum(0), bias, partial_gate.sum(0), gate_bias]


def kernels() -> dict[str, Kernel]:
    """The kernel of this file as it ships."""
    return {
        "triangle_project_weights": Kernel(
            triangle_project_weights_kernel,
            lambda c, dtype: {"C": c, "CZ": c, "BZ": padded(c), "SPLIT": dtype != torch.float32},
            ("size", "z_i", "z_j", "mask_i"),
            ("n",),
            ("z_c", "mask_j"),
            EXACT | {"grad_proj", "grad_gate", "grad_biases"},
        )
    }
