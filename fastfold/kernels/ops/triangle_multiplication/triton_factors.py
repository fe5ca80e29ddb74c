"""First half of triangle multiplication in Triton: normalise, project, gate and mask, channels first; and gradients."""

from __future__ import annotations

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
    splits,
)
from fastfold.kernels.common.triton_math import (
    cast,
    channels_again,
    dot,
    index_again,
    load_again,
    pair_tile,
    precision,
    sigmoid,
)
from fastfold.kernels.ops.triangle_multiplication.params import EPS, FactorParams

SIZES = ["rows", "n", "width"]  #: Arguments of kernels whose divisibility changes nothing


@triton.jit
def pair_positions(i_m, size, rows, n, width, BM: tl.constexpr):
    """Return positions ``[BM]`` of a block of factors or product, which have ``size`` in rows of ``width``.

    Also return the mask of those that exist, their rows and columns, and the mask of those within the pair
    ``[rows, n]``: factors and product may have more and longer rows than the pair, filled with zeros.
    """
    first = tl.cast(i_m, tl.int64) * BM
    o_m = first + tl.arange(0, BM)
    m_m = o_m < size
    # Within the block in 32 bits, in which division is much cheaper.
    o_b = (first % width).to(tl.int32) + tl.arange(0, BM)
    o_i, o_j = (first // width).to(tl.int32) + o_b // width, o_b % width
    m_pair = m_m & (o_i < rows) & (o_j < n)
    return o_m, m_m, o_i.to(tl.int64), o_j.to(tl.int64), m_pair


@triton.jit
def load_pair(z, z_strides, weights, o_i, o_j, m_m, o_z, m_z, CZ, EPS):
    """Load and normalise positions ``[BM, BZ]`` of ``z [R, N, CZ]``; also return statistics, and pointers ``[BM]``."""
    p_z = z + o_i * z_strides[0] + o_j * z_strides[1]
    norm = (weights.norm_weight, weights.norm_bias)
    b_z, b_statistics = load_normalized(p_z, o_z * z_strides[2], norm, o_z, m_m, m_z, CZ, EPS)
    return b_z, b_statistics, p_z


@triton.jit
def load_mask(mask, strides, o_i, o_j, m_m):
    """Load the mask ``[BM]`` of positions, in float32."""
    return tl.load(mask + o_i * strides[0] + o_j * strides[1], mask=m_m, other=0.0).to(tl.float32)


@triton.jit
def projections_and_gates(
    b_z, p_z, z_c, b_statistics, weights, o_w, m_h, m_m,
    CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute projections and gates ``[BM, BH]`` of normalised positions, by rows ``o_w`` of the weights."""
    norm = (weights.norm_weight, weights.norm_bias)
    b_projection = projected(
        b_z, p_z, z_c, b_statistics, norm, weights.proj_weight, weights.proj_bias, o_w, m_m, m_h,
        CZ, BM, BZ, BH, BK, SPLIT, PRECISION,
    )  # fmt: skip
    b_gate = projected(
        b_z, p_z, z_c, b_statistics, norm, weights.gate_weight, weights.gate_bias, o_w, m_m, m_h,
        CZ, BM, BZ, BH, BK, SPLIT, PRECISION,
    )  # fmt: skip
    return b_projection, sigmoid(b_gate)


@triton.jit(do_not_specialize=SIZES)
def triangle_project_kernel(
    z, mask, projections, weights, rows, n, width, size, first, group, z_strides, mask_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill BM positions of ``projections [2 group, size]``: channels from ``first`` on of left, then of right."""
    o_m, m_m, o_i, o_j, m_pair = pair_positions(tl.program_id(0), size, rows, n, width, BM)
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_norm, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
    b_mask = load_mask(mask, mask_strides, o_i, o_j, m_pair)
    for i_h in range(0, 2 * group, BH):
        o_h = i_h + tl.arange(0, BH)
        m_h = o_h < 2 * group
        o_w = tl.where(o_h < group, first + o_h, C + first + o_h - group)
        b_projection, b_gate = projections_and_gates(
            b_norm, p_z, z_strides[2], b_statistics, weights, o_w, m_h, m_pair,
            CZ, BZ, BM, BH, BK, SPLIT, PRECISION,
        )  # fmt: skip
        b_projection *= b_gate * b_mask[:, None]
        p_projection = projections + o_h.to(tl.int64)[None, :] * size + o_m[:, None]
        m_projection = m_m[:, None] & m_h[None, :]
        tl.store(p_projection, cast(b_projection, projections.dtype.element_ty), mask=m_projection)


def project(
    projections: Tensor,
    z: Tensor,
    mask: Tensor,
    weights: FactorParams,
    first: int,
    group: int,
    split: bool = False,
) -> None:
    """Fill ``projections [2 group, R', N']`` for rows ``z [R, N, c_z]`` of one batch element, with zeros past them."""
    # With ``split`` a second product adds the part of a normalised row that rounding to the dtype of the weights
    # removes.
    rows, n, c_z = z.shape
    size, width = projections.shape[1] * projections.shape[2], projections.shape[2]
    config = configuration("triangle_project", z, c_z)
    launch(triangle_project_kernel, (triton.cdiv(size, config.blocks["BM"]),))(
        *(z, mask, projections, weights, rows, n, width, size, first, group, z.stride(), mask.stride(), EPS),
        C=len(weights.proj_weight) // 2,
        CZ=c_z,
        BZ=padded(c_z),
        SPLIT=split,
        PRECISION=precision(z, config),
        **config.launch,
    )


@triton.jit
def gated_projection_gradients(
    b_z, p_z, z_c, b_statistics, weights, p_grad, size, b_mask, o_h, m_h, m_m, m_pair,
    CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients ``[BM, BH]`` of projections and gate logits, which are recomputed."""
    b_projection, b_gate = projections_and_gates(
        b_z, p_z, z_c, b_statistics, weights, o_h, m_h, m_pair, CZ, BZ, BM, BH, BK, False, PRECISION
    )
    # [BM, BH]
    p_block = p_grad[:, None] + o_h.to(tl.int64)[None, :] * size
    b_grad = tl.load(p_block, mask=m_m[:, None] & m_h[None, :], other=0.0)
    if b_grad.dtype == tl.float16:
        # Gradients of masked positions may overflow float16, and infinity times zero is NaN.
        b_grad = tl.where((b_mask == 0.0)[:, None], 0.0, b_grad)
    b_grad = b_grad.to(tl.float32) * b_mask[:, None]
    b_grad_projection = b_grad * b_gate
    return b_grad_projection, b_grad_projection * b_projection * (1.0 - b_gate)


@triton.jit(do_not_specialize=SIZES)
def triangle_project_backward_kernel(
    grad_projections, z, mask, grad, grad_z, grad_norm, weights, rows, n, width, size,
    z_strides, mask_strides, grad_strides, grad_z_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    ADD_GRAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn ``grad_z`` from the output gate's share for the normalised ``z`` into the gradient of ``z``."""
    # Write partial sums for the parameters of the norm to ``grad_norm [programs, 2, CZ]``.
    norm = (weights.norm_weight, weights.norm_bias)
    p_partial = grad_norm + tl.program_id(0) * 2 * CZ
    AGAIN: tl.constexpr = BZ <= 128  # wider rows have smaller blocks
    for i_m in range(tl.program_id(0), tl.cdiv(size, BM), tl.num_programs(0)):
        o_m, m_m, o_i, o_j, m_pair = pair_positions(i_m, size, rows, n, width, BM)
        o_z, m_z = channels_again(CZ, BZ, AGAIN)
        b_z, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
        b_mask = load_mask(mask, mask_strides, o_i, o_j, m_pair)
        b_total = tl.zeros([BM, BZ], tl.float32)
        for i_h in range(0, 2 * C, BH):
            o_h = i_h + tl.arange(0, BH)
            m_h = o_h < 2 * C
            b_projection, b_logits = gated_projection_gradients(
                b_z, p_z, z_strides[2], b_statistics, weights, grad_projections + o_m, size, b_mask,
                o_h, m_h, m_m, m_pair, CZ, BZ, BM, BH, BK, PRECISION,
            )  # fmt: skip
            o_w = o_h[:, None] * CZ + o_z[None, :]
            m_w = m_h[:, None] & m_z[None, :]
            # [BH, BZ]
            b_w = tl.load(weights.proj_weight + o_w, mask=m_w, other=0.0)
            b_total += dot(cast(b_projection, b_w.dtype), b_w, PRECISION)
            # [BH, BZ]
            b_w = tl.load(weights.gate_weight + o_w, mask=m_w, other=0.0)
            b_total += dot(cast(b_logits, b_w.dtype), b_w, PRECISION)
        # The sum fills the registers: positions and channels are computed again.
        _, _, o_i, o_j, m_pair = pair_positions(index_again(i_m, AGAIN), size, rows, n, width, BM)
        o_z, m_z = channels_again(CZ, BZ, AGAIN)
        m_zz = m_pair[:, None] & m_z[None, :]
        p_z = z + o_i * z_strides[0] + o_j * z_strides[1]
        p_out = pair_tile(grad_z, grad_z_strides, o_i, o_j, o_z)
        # [BM, BZ]
        b_total += tl.load(p_out, mask=m_zz, other=0.0).to(tl.float32)
        b_z = load_again(p_z[:, None] + o_z[None, :] * z_strides[2], m_zz).to(tl.float32)
        add_sums(p_partial + CZ + o_z, b_total, m_z, i_m == tl.program_id(0))
        b_total, b_scales = normalized_backward(b_total, b_z, b_statistics, norm, o_z, m_z, CZ)
        add_sums(p_partial + o_z, b_scales, m_z, i_m == tl.program_id(0))
        if ADD_GRAD:
            p_grad = pair_tile(grad, grad_strides, o_i, o_j, o_z)
            b_total += tl.load(p_grad, mask=m_zz, other=0.0).to(tl.float32)
        tl.store(p_out, cast(b_total, grad_z.dtype.element_ty), mask=m_zz)


def projection_backward(
    grad_projections: Tensor,
    z: Tensor,
    mask: Tensor,
    add: Tensor | None,
    grad_z: Tensor,
    weights: FactorParams,
) -> list[Tensor]:
    """Turn ``grad_z [R, N, c_z]`` into the gradient of ``z [R, N, c_z]``, and return those of scale and shift.

    The latter are in float32. ``grad_z`` has the output gate's share of the gradient of the normalised ``z``. The
    gradients ``[2 c, R', N']`` of the factors are read only within the pair. ``add`` is the gradient of the operator's
    result if ``z`` is also the residual. The weights are contiguous, in the dtypes that kernels read.
    """
    rows, n, c_z = z.shape
    grad = z if add is None else add  # without add it is not read, so any tensor serves
    config = configuration("triangle_project_backward", z, c_z)
    size, width = grad_projections.shape[1] * grad_projections.shape[2], grad_projections.shape[2]
    programs = min(PROGRAMS, triton.cdiv(size, config.blocks["BM"]))
    partial = z.new_empty(programs, 2, c_z, dtype=torch.float32)
    launch(triangle_project_backward_kernel, (programs,))(
        *(grad_projections, z, mask, grad, grad_z, partial, weights, rows, n, width, size),
        *(z.stride(), mask.stride(), grad.stride(), grad_z.stride(), EPS),
        C=len(grad_projections) // 2,
        CZ=c_z,
        BZ=padded(c_z),
        ADD_GRAD=add is not None,
        PRECISION=precision(z, config),
        **config.launch,
    )
    return list(partial.sum(0))


@triton.jit(do_not_specialize=SIZES)
def triangle_project_weights_kernel(
    grad_projections, z, mask, grad_proj, grad_gate, grad_biases, weights, rows, n, width, size,
    z_strides, mask_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the weights' gradients."""
    # A program owns BH rows of projection and gate, and a part of the positions. It writes partial sums: ``[programs,
    # 2 C, CZ]`` for each weight, and ``[programs, 2, 2 C]`` for the biases.
    o_h = tl.program_id(0) * BH + tl.arange(0, BH)
    m_h = o_h < 2 * C
    o_z = tl.arange(0, BZ)
    m_z = o_z < CZ
    b_grad_proj = tl.zeros([BH, BZ], tl.float32)
    b_grad_gate = tl.zeros([BH, BZ], tl.float32)
    b_grad_bias = tl.zeros([BH], tl.float32)
    b_grad_gate_bias = tl.zeros([BH], tl.float32)
    for i_m in range(tl.program_id(1), tl.cdiv(size, BM), tl.num_programs(1)):
        o_m, m_m, o_i, o_j, m_pair = pair_positions(i_m, size, rows, n, width, BM)
        b_z, b_statistics, p_z = load_pair(z, z_strides, weights, o_i, o_j, m_pair, o_z, m_z, CZ, EPS)
        b_mask = load_mask(mask, mask_strides, o_i, o_j, m_pair)
        b_projection, b_logits = gated_projection_gradients(
            b_z, p_z, z_strides[2], b_statistics, weights, grad_projections + o_m, size, b_mask,
            o_h, m_h, m_m, m_pair, CZ, BZ, BM, BH, BK, PRECISION,
        )  # fmt: skip
        b_grad_bias += tl.sum(b_projection, 0)
        b_grad_gate_bias += tl.sum(b_logits, 0)
        dtype = weights.proj_weight.dtype.element_ty
        b_x = cast(b_z, dtype)
        b_grad_proj += dot(tl.trans(cast(b_projection, dtype)), b_x, PRECISION)
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
    grad_projections: Tensor, z: Tensor, mask: Tensor, weights: FactorParams
) -> list[Tensor]:
    """Return gradients, in float32, of projection and gate, each weight before bias.

    Arguments are those of :func:`projection_backward`.
    """
    rows, n, c_z = z.shape
    c = len(grad_projections) // 2
    config = configuration("triangle_project_weights", z, c_z)
    programs = triton.cdiv(2 * c, config.blocks["BH"])
    size, width = grad_projections.shape[1] * grad_projections.shape[2], grad_projections.shape[2]
    parts = splits(size, config.blocks["BM"], programs)
    partial, partial_gate = z.new_empty(2, parts, 2 * c, c_z, dtype=torch.float32)
    partial_bias = z.new_empty(parts, 2, 2 * c, dtype=torch.float32)
    launch(triangle_project_weights_kernel, (programs, parts))(
        *(grad_projections, z, mask, partial, partial_gate, partial_bias, weights, rows, n, width, size),
        *(z.stride(), mask.stride(), EPS),
        C=c,
        CZ=c_z,
        BZ=padded(c_z),
        PRECISION=precision(z, config),
        **config.launch,
    )
    bias, gate_bias = partial_bias.sum(0)
    return [partial.sum(0), bias, partial_gate.sum(0), gate_bias]
