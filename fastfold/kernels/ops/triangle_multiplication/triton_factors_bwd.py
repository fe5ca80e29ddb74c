"""First half of triangle multiplication in Triton, backward: from gated projections to the pair and the weights."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

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
def gated_side_gradients(
    b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, proj, proj_bias, gate, gate_bias,
    p_side, size, b_mask, o_h, m_h, m_m,
    CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients ``[BM, BH]`` of projections and gate logits, which it recomputes."""
    b_side = rows_product(
        b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, proj + o_h * CZ, 1, m_m, m_h,
        CZ, BM, BZ, BH, BK, True, SPLIT, PRECISION,
    )  # fmt: skip
    b_side += tl.load(proj_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    b_gate = rows_product(
        b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, gate + o_h * CZ, 1, m_m, m_h,
        CZ, BM, BZ, BH, BK, True, SPLIT, PRECISION,
    )  # fmt: skip
    b_gate = tl.sigmoid(b_gate + tl.load(gate_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :])
    # [BM, BH]
    p_block = p_side[:, None] + o_h.to(tl.int64)[None, :] * size
    b_grad = tl.load(p_block, mask=m_m[:, None] & m_h[None, :], other=0.0).to(tl.float32) * b_mask[:, None]
    b_grad_side = b_grad * b_gate
    return b_grad_side, b_grad_side * b_side * (1.0 - b_gate)


@triton.jit(do_not_specialize=["n"])
def triangle_project_backward_kernel(
    grad_sides,
    z,
    mask,
    grad,
    grad_z,
    grad_norm,
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
    grad_i,
    grad_j,
    grad_c,
    grad_z_i,
    grad_z_j,
    grad_z_c,
    EPS,
    C: tl.constexpr,
    CZ: tl.constexpr,
    BZ: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    ADD_GRAD: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Turns ``grad_z``, which holds the output gate's share for the normalised ``z``, into the gradient of ``z``.

    Leaves ``[programs, 2, CZ]`` partial sums for the parameters of the norm.
    """
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_grad_weight = tl.zeros([BZ], tl.float32)
    b_grad_bias = tl.zeros([BZ], tl.float32)
    for i_m in range(tl.program_id(0), tl.cdiv(size, BM), tl.num_programs(0)):
        o_m, o_i, o_j = pair_positions(i_m, n, BM)
        m_m = o_m < size
        m_zz = m_m[:, None] & m_z[None, :]
        p_z = z + o_i * z_i + o_j * z_j
        # [BM, BZ]
        b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_zz, other=0.0).to(tl.float32)
        b_mean, b_rstd = row_statistics(b_z, m_z, CZ, EPS)
        b_z = normalised(b_z, b_mean, b_rstd, norm_weight, norm_bias, o_z, m_z)
        # [BM]
        b_mask = tl.load(mask + o_i * mask_i + o_j * mask_j, mask=m_m, other=0.0).to(tl.float32)
        b_total = tl.zeros([BM, BZ], tl.float32)
        for i_h in range(0, 2 * C, BH):
            o_h = i_h + tl.arange(0, BH)
            m_h = o_h < 2 * C
            b_side, b_logits = gated_side_gradients(
                b_z, p_z, z_c, b_mean, b_rstd, norm_weight, norm_bias, proj, proj_bias, gate, gate_bias,
                grad_sides + o_m, size, b_mask, o_h, m_h, m_m, CZ, BZ, BM, BH, BK, SPLIT, PRECISION,
            )  # fmt: skip
            o_w = o_h[:, None] * CZ + o_z[None, :]
            m_w = m_h[:, None] & m_z[None, :]
            # [BH, BZ]
            b_w = tl.load(proj + o_w, mask=m_w, other=0.0)
            b_total += split_dot(b_side, b_w, SPLIT, PRECISION)
            # [BH, BZ]
            b_w = tl.load(gate + o_w, mask=m_w, other=0.0)
            b_total += split_dot(b_logits, b_w, SPLIT, PRECISION)
        p_out = grad_z + (o_i * grad_z_i + o_j * grad_z_j)[:, None] + o_z[None, :] * grad_z_c
        # [BM, BZ]
        b_total += tl.load(p_out, mask=m_zz, other=0.0).to(tl.float32)
        # Read again rather than kept in registers through the loop.
        b_z = tl.load(p_z[:, None] + o_z[None, :] * z_c, mask=m_zz, other=0.0).to(tl.float32)
        b_grad_bias += tl.sum(b_total, 0)
        b_total, b_scales = normalised_backward(b_total, b_z, b_mean, b_rstd, norm_weight, o_z, m_z, CZ)
        b_grad_weight += tl.sum(b_scales, 0)
        if ADD_GRAD:
            p_grad = grad + (o_i * grad_i + o_j * grad_j)[:, None] + o_z[None, :] * grad_c
            b_total += tl.load(p_grad, mask=m_zz, other=0.0).to(tl.float32)
        tl.store(p_out, cast(b_total, grad_z.dtype.element_ty), mask=m_zz)
    p_partial = grad_norm + tl.program_id(0) * 2 * CZ + o_z
    tl.store(p_partial, b_grad_weight, mask=m_z)
    tl.store(p_partial + CZ, b_grad_bias, mask=m_z)


def projection_backward(
    grad_sides: Tensor,
    z: Tensor,
    mask: Tensor,
    grad: Tensor,
    grad_z: Tensor,
    parameters: Sequence[Tensor],
    add_grad: bool,
) -> list[Tensor]:
    """Turn ``grad_z`` into the gradient of ``z``, and return those of the norm.

    Args:
        grad_sides: ``[2 c, R, N]``, gradients of the factors of the contraction.
        z: ``[R, N, c_z]``, rows of one batch element.
        mask: ``[R, N]``.
        grad: Gradient of the operator's result, for the residual.
        grad_z: Holds the output gate's share of the gradient of the normalised ``z``.
        parameters: The arranged ones, of the whole operator.
        add_grad: Whether ``z`` is the residual as well.

    Returns:
        Gradients, in float32, of the first two parameters.
    """
    rows, n, c_z = z.shape
    config = configuration("triangle_project_backward", z, c_z)
    programs = min(PROGRAMS, triton.cdiv(rows * n, config.blocks["BM"]))
    partial = z.new_empty(programs, 2, c_z, dtype=torch.float32)
    triangle_project_backward_kernel[(programs,)](
        grad_sides, z, mask, grad, grad_z, partial, *parameters[:6], n, rows * n, *z.stride(), *mask.stride(),
        *grad.stride(), *grad_z.stride(), EPS, C=len(grad_sides) // 2, CZ=c_z, BZ=padded(c_z),
        ADD_GRAD=add_grad, SPLIT=z.dtype != torch.float32, PRECISION=precision(z), **config.launch,
    )  # fmt: skip
    return list(partial.sum(0))


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
    """The kernels of this file as they ship."""
    return {
        "triangle_project_backward": Kernel(
            triangle_project_backward_kernel,
            lambda c, dtype: {
                "C": c,
                "CZ": c,
                "BZ": padded(c),
                "ADD_GRAD": True,
                "SPLIT": dtype != torch.float32,
            },
            ("size", "z_i", "z_j", "mask_i", "grad_i", "grad_j", "grad_z_i", "grad_z_j"),
            ("n",),
            ("z_c", "mask_j", "grad_c", "grad_z_c"),
            EXACT | {"grad_norm"},
        ),
        "triangle_project_weights": Kernel(
            triangle_project_weights_kernel,
            lambda c, dtype: {"C": c, "CZ": c, "BZ": padded(c), "SPLIT": dtype != torch.float32},
            ("size", "z_i", "z_j", "mask_i"),
            ("n",),
            ("z_c", "mask_j"),
            EXACT | {"grad_proj", "grad_gate", "grad_biases"},
        ),
    }
