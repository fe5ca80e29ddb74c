"""Transition in Triton: hidden channels exist in registers, for one block of rows and channels at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalized_rows import configuration, load_normalized, projected
from fastfold.kernels.common.parameters import in_dtype
from fastfold.kernels.common.scratch import position_blocks
from fastfold.kernels.common.triton_math import cast, dot, precision
from fastfold.kernels.ops.transition.params import EPS, TransitionParams

WHOLE = 2**62  #: Block size above any number of positions: one launch, if strides allow it


@triton.jit(do_not_specialize=["rows"])
def transition_forward_kernel(
    x, residual, out, weights, rows, hidden, x_strides, residual_strides, out_strides, EPS,
    C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the transition: a program owns BM rows, and walks over the hidden channels."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_m = o_m < rows
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    m_x = m_m[:, None] & m_c[None, :]
    norm = (weights.norm_weight, weights.norm_bias)
    p_x = x + o_m * x_strides[0]
    b_norm, b_statistics = load_normalized(p_x, o_c * x_strides[1], norm, o_c, m_m, m_c, C, EPS)
    b_out = tl.zeros([BM, BC], tl.float32)
    for i_h in range(0, hidden, BH):
        o_h = i_h + tl.arange(0, BH)
        m_h = o_h < hidden
        b_hidden = projected(
            b_norm, p_x, x_strides[1], b_statistics, norm, weights.w1, weights.b1, o_h, m_m, m_h,
            C, BM, BC, BH, BK, False, PRECISION,
        )  # fmt: skip
        b_hidden = cast(tl.maximum(b_hidden, 0.0), weights.w2.dtype.element_ty)
        # [BH, BC]
        p_w2 = weights.w2 + o_c[None, :] * hidden + o_h[:, None]
        b_w2 = tl.load(p_w2, mask=m_h[:, None] & m_c[None, :], other=0.0)
        b_out += dot(b_hidden, b_w2, PRECISION)
    b_out += tl.load(weights.b2 + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        p_residual = residual + o_m[:, None] * residual_strides[0] + o_c[None, :] * residual_strides[1]
        b_out += tl.load(p_residual, mask=m_x, other=0.0).to(tl.float32)
    p_out = out + o_m[:, None] * out_strides[0] + o_c[None, :] * out_strides[1]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_x)


def forward(out: Tensor, x: Tensor, parameters: TransitionParams, residual: Tensor | None) -> None:
    """Fill ``out``, which may be ``x`` or ``residual``; arguments as of ``transition``."""
    c = x.shape[-1]
    weights = in_dtype(parameters, x.dtype)
    config = configuration("transition_forward", x, c)
    residuals = () if residual is None else (residual,)
    for b_x, b_out, *b_residual in position_blocks(WHOLE, x, out, *residuals):
        rows = len(b_x)
        if rows == 0:
            continue
        b_add = b_residual[0] if b_residual else b_x
        launch(transition_forward_kernel, (triton.cdiv(rows, config.blocks["BM"]),))(
            *(b_x, b_add, b_out, weights, rows, len(weights.w1)),
            *(b_x.stride(), b_add.stride(), b_out.stride(), EPS),
            C=c,
            BC=padded(c),
            HAS_RESIDUAL=bool(b_residual),
            PRECISION=precision(x, config),
            **config.launch,
        )
