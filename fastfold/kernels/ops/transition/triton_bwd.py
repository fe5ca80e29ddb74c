"""Transition in Triton, backward: everything except the input is recomputed, and sums have a fixed order."""

from __future__ import annotations

from collections.abc import Collection

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
    rows_product,
    splits,
)
from fastfold.kernels.common.parameters import Totals, in_dtype
from fastfold.kernels.common.scratch import position_blocks
from fastfold.kernels.common.triton_math import cast, channels_again, dot, index_again, load_again, precision
from fastfold.kernels.ops.transition.params import EPS, TransitionParams
from fastfold.kernels.ops.transition.triton_fwd import WHOLE


@triton.jit
def store_signs(signs, b_hidden, o_m, i_h, hidden, m_m, BM: tl.constexpr, BH: tl.constexpr):
    """Write which hidden channels ``b_hidden [BM, BH]`` from ``i_h`` on pass the ReLU, eight channels in a byte."""
    # [BM, BH / 8, 8]
    b_bits = tl.reshape((b_hidden > 0.0).to(tl.int32), [BM, BH // 8, 8]) << tl.arange(0, 8)[None, None, :]
    o_b = i_h // 8 + tl.arange(0, BH // 8)
    p_signs = signs + o_m[:, None] * tl.cdiv(hidden, 8) + o_b[None, :]
    tl.store(p_signs, tl.sum(b_bits, 2).to(tl.uint8), mask=m_m[:, None] & (o_b * 8 < hidden)[None, :])


@triton.jit
def load_signs(signs, o_m, i_h, hidden, m_m, BM: tl.constexpr, BH: tl.constexpr):
    """Read ``[BM, BH]`` of :func:`store_signs`."""
    o_b = i_h // 8 + tl.arange(0, BH // 8)
    p_signs = signs + o_m[:, None] * tl.cdiv(hidden, 8) + o_b[None, :]
    b_bytes = tl.load(p_signs, mask=m_m[:, None] & (o_b * 8 < hidden)[None, :], other=0).to(tl.int32)
    # [BM, BH / 8, 8]
    b_bits = (b_bytes[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(b_bits, [BM, BH]) != 0


@triton.jit(do_not_specialize=["rows"])
def transition_backward_rows_kernel(
    x, grad, grad_x, grad_norm, signs, weights, rows, hidden, x_strides, grad_strides, grad_x_strides, EPS,
    C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    ADD_GRAD: tl.constexpr, SPLIT: tl.constexpr, SIGNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the rows; write sums for the parameters of the norm to ``grad_norm [programs, 2, C]``.

    With SIGNS, also write a bit for each hidden channel that passes the ReLU to ``signs [rows, hidden / 8]``.
    """
    # An activation on the wrong side of the ReLU makes a unit's gradient entirely wrong. So a second product (SPLIT)
    # adds the part of the normalised rows that rounding to the dtype of the weights removes.
    norm = (weights.norm_weight, weights.norm_bias)
    p_partial = grad_norm + tl.program_id(0) * 2 * C
    AGAIN: tl.constexpr = weights.w1.dtype.element_ty != tl.float32  # products of float32 have smaller blocks
    for i_m in range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0)):
        o_m = tl.cast(i_m, tl.int64) * BM + tl.arange(0, BM)
        m_m = o_m < rows
        o_c, m_c = channels_again(C, BC, AGAIN)
        m_x = m_m[:, None] & m_c[None, :]
        p_x = x + o_m * x_strides[0]
        p_grad = grad + o_m * grad_strides[0]
        b_norm, b_statistics = load_normalized(p_x, o_c * x_strides[1], norm, o_c, m_m, m_c, C, EPS)
        # [BM, BC]
        b_grad = tl.load(p_grad[:, None] + o_c[None, :] * grad_strides[1], mask=m_x, other=0.0).to(tl.float32)
        b_grad_norm = tl.zeros([BM, BC], tl.float32)
        for i_h in range(0, hidden, BH):
            o_h = i_h + tl.arange(0, BH)
            m_h = o_h < hidden
            b_hidden = projected(
                b_norm, p_x, x_strides[1], b_statistics, norm, weights.w1, weights.b1, o_h, m_m, m_h,
                C, BM, BC, BH, BK, SPLIT, PRECISION,
            )  # fmt: skip
            if SIGNS:
                store_signs(signs, b_hidden, o_m, i_h, hidden, m_m, BM, BH)
            b_grad_hidden = rows_product(
                b_grad, p_grad, grad_strides[1], b_statistics, norm, weights.w2 + o_h, hidden, m_m, m_h,
                C, BM, BC, BH, BK, False, False, PRECISION,
            )  # fmt: skip
            b_grad_hidden = cast(tl.where(b_hidden > 0.0, b_grad_hidden, 0.0), weights.w1.dtype.element_ty)
            # [BH, BC]
            p_w1 = weights.w1 + o_h[:, None] * C + o_c[None, :]
            b_w1 = tl.load(p_w1, mask=m_h[:, None] & m_c[None, :], other=0.0)
            b_grad_norm += dot(b_grad_hidden, b_w1, PRECISION)
        # The sum fills the registers: rows and channels are computed again.
        o_m = tl.cast(index_again(i_m, AGAIN), tl.int64) * BM + tl.arange(0, BM)
        o_c, m_c = channels_again(C, BC, AGAIN)
        m_x = (o_m < rows)[:, None] & m_c[None, :]
        p_x, p_grad = x + o_m * x_strides[0], grad + o_m * grad_strides[0]
        b_x = load_again(p_x[:, None] + o_c[None, :] * x_strides[1], m_x).to(tl.float32)
        add_sums(p_partial + C + o_c, b_grad_norm, m_c, i_m == tl.program_id(0))
        b_grad_x, b_scales = normalized_backward(b_grad_norm, b_x, b_statistics, norm, o_c, m_c, C)
        add_sums(p_partial + o_c, b_scales, m_c, i_m == tl.program_id(0))
        if ADD_GRAD:
            p_add = p_grad[:, None] + o_c[None, :] * grad_strides[1]
            b_grad_x += load_again(p_add, m_x).to(tl.float32)
        p_out = grad_x + o_m[:, None] * grad_x_strides[0] + o_c[None, :] * grad_x_strides[1]
        tl.store(p_out, cast(b_grad_x, grad_x.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["rows"])
def transition_backward_weights_kernel(
    x, grad, grad_w1, grad_w2, grad_b1, signs, weights, rows, hidden, x_strides, grad_strides, EPS,
    C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, SIGNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the weights' gradients: a program owns BH hidden channels and a part of the rows."""
    # It writes partial sums: ``[programs, hidden, C]`` for each weight (``w2`` transposed), and ``[programs,
    # hidden]`` for the bias.
    o_h = tl.program_id(0) * BH + tl.arange(0, BH)
    m_h = o_h < hidden
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    norm = (weights.norm_weight, weights.norm_bias)
    b_grad_w1 = tl.zeros([BH, BC], tl.float32)
    b_grad_w2 = tl.zeros([BH, BC], tl.float32)
    b_grad_b1 = tl.zeros([BH], tl.float32)
    b_b1 = tl.load(weights.b1 + o_h, mask=m_h, other=0.0).to(tl.float32)
    for i_m in range(tl.program_id(1), tl.cdiv(rows, BM), tl.num_programs(1)):
        o_m = tl.cast(i_m, tl.int64) * BM + tl.arange(0, BM)
        m_m = o_m < rows
        p_x = x + o_m * x_strides[0]
        p_grad = grad + o_m * grad_strides[0]
        b_norm, b_statistics = load_normalized(p_x, o_c * x_strides[1], norm, o_c, m_m, m_c, C, EPS)
        # [BM, BC]
        p_block = p_grad[:, None] + o_c[None, :] * grad_strides[1]
        b_grad = tl.load(p_block, mask=m_m[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        b_hidden = rows_product(
            b_norm, p_x, x_strides[1], b_statistics, norm, weights.w1 + o_h * C, 1, m_m, m_h,
            C, BM, BC, BH, BK, True, SPLIT, PRECISION,
        )  # fmt: skip
        b_hidden = tl.maximum(b_hidden + b_b1[None, :], 0.0)
        if SIGNS:
            b_passes = load_signs(signs, o_m, tl.program_id(0) * BH, hidden, m_m, BM, BH)
            b_hidden = tl.where(b_passes, b_hidden, 0.0)
        else:
            b_passes = b_hidden > 0.0
        b_grad_hidden = rows_product(
            b_grad, p_grad, grad_strides[1], b_statistics, norm, weights.w2 + o_h, hidden, m_m, m_h,
            C, BM, BC, BH, BK, False, False, PRECISION,
        )  # fmt: skip
        b_grad_hidden = tl.where(b_passes, b_grad_hidden, 0.0)
        b_grad_b1 += tl.sum(b_grad_hidden, 0)
        dtype = weights.w1.dtype.element_ty
        b_grad_w1 += dot(tl.trans(cast(b_grad_hidden, dtype)), cast(b_norm, dtype), PRECISION)
        b_grad_w2 += dot(tl.trans(cast(b_hidden, dtype)), cast(b_grad, dtype), PRECISION)
    i_s = tl.program_id(1).to(tl.int64)
    o_w = (i_s * hidden + o_h)[:, None] * C + o_c[None, :]
    m_w = m_h[:, None] & m_c[None, :]
    tl.store(grad_w1 + o_w, b_grad_w1, mask=m_w)
    tl.store(grad_w2 + o_w, b_grad_w2, mask=m_w)
    tl.store(grad_b1 + i_s * hidden + o_h, b_grad_b1, mask=m_h)


def backward(
    grad: Tensor, x: Tensor, parameters: TransitionParams, add_grad: bool, needed: Collection[str]
) -> list[Tensor | None]:
    """Return gradients of ``x [*, c]`` in its dtype, and of the parameters in float32.

    A gradient that is not needed is None or has any content.

    Arguments as of the PyTorch path; ``needed`` are the names of the inputs that need a gradient.
    """
    c = x.shape[-1]
    weights = in_dtype(parameters, x.dtype)
    hidden = len(weights.w1)
    switches = {"C": c, "BC": padded(c)}
    split = x.dtype != torch.float32
    of_rows = bool({"x", "norm_weight", "norm_bias"} & set(needed))
    of_weights = bool({"w1", "b1", "w2", "b2"} & set(needed))
    # The second kernel need not make the split products again if the first one keeps the signs that they decide.
    keep = split and of_rows and of_weights
    grad_x = torch.empty_like(x)
    totals = Totals()
    for b_x, b_grad, b_grad_x in position_blocks(WHOLE, x, grad, grad_x):
        rows = len(b_x)
        if rows == 0:
            continue
        signs = x.new_empty(rows if keep else 0, triton.cdiv(hidden, 8), dtype=torch.uint8)
        if of_rows:
            config = configuration("transition_backward_rows", x, c)
            programs = min(PROGRAMS, triton.cdiv(rows, config.blocks["BM"]))
            partial = x.new_empty(programs, 2, c, dtype=torch.float32)
            launch(transition_backward_rows_kernel, (programs,))(
                *(b_x, b_grad, b_grad_x, partial, signs, weights, rows, hidden),
                *(b_x.stride(), b_grad.stride(), b_grad_x.stride(), EPS),
                ADD_GRAD=add_grad,
                SPLIT=split,
                SIGNS=keep,
                PRECISION=precision(x, config),
                **switches,
                **config.launch,
            )
            totals.add(norm_weight=partial[:, 0].sum(0), norm_bias=partial[:, 1].sum(0))
        if of_weights:
            config = configuration("transition_backward_weights", x, c)
            programs = triton.cdiv(hidden, config.blocks["BH"])
            parts = splits(rows, config.blocks["BM"], programs)
            partial_w1, partial_w2 = x.new_empty(2, parts, hidden, c, dtype=torch.float32)
            partial_b1 = x.new_empty(parts, hidden, dtype=torch.float32)
            launch(transition_backward_weights_kernel, (programs, parts))(
                *(b_x, b_grad, partial_w1, partial_w2, partial_b1, signs, weights, rows, hidden),
                *(b_x.stride(), b_grad.stride(), EPS),
                SPLIT=split and not keep,
                SIGNS=keep,
                PRECISION=precision(x, config),
                **switches,
                **config.launch,
            )
            totals.add(w1=partial_w1.sum(0), b1=partial_b1.sum(0))
            totals.add(w2=partial_w2.sum(0).t().contiguous(), b2=b_grad.sum(0, dtype=torch.float32))
    return [grad_x, *totals.of(parameters, needed)]
