"""Kernels of the gradients of attention: weights are recomputed from the saved sums of exponentials.

Every gradient has a kernel whose programs own blocks of it: that of the queries walks over the keys, that of keys
and values over the queries, and that of the bias over the rows. So no sum is atomic, and results are the same in every
run.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from fastfold.kernels.common.triton_math import cast, dot
from fastfold.kernels.ops.attention.triton_fwd import (
    LOG2E,
    SIZES,
    bias_of,
    head_block,
    head_of,
    own_block,
    positions,
    program_row,
    scores,
)


@triton.jit
def weights_and_gradients(b_s, b_dp, b_lse, b_delta, b_keep, keys, HAS_MASK: tl.constexpr):
    """Weights, and gradients of their scores, of scores in powers of two; arguments are broadcast.

    A masked key has the weight 0, in rows without keys 1 / keys, and no gradient.
    """
    if HAS_MASK:
        b_p = tl.where(b_lse == float("inf"), 1.0 / keys, tl.where(b_keep, tl.exp2(b_s - b_lse), 0.0))
        b_ds = tl.where(b_keep, b_p * (b_dp - b_delta), 0.0)
    else:
        b_p = tl.where(b_keep, tl.exp2(b_s - b_lse), 0.0)
        b_ds = b_p * (b_dp - b_delta)
    return b_p, b_ds


@triton.jit(do_not_specialize=SIZES)
def attention_grad_q_kernel(
    x, grad_q, scale, heads, rows, queries, keys, x_strides, grad_q_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns a block of queries of one row and head, and walks over the keys."""
    i_q, i_r, i_h, i_b = program_row(tl.cdiv(queries, BQ), rows, heads)
    o_q, o_d, m_q, m_d, m_qd = own_block(i_q, queries, D, BQ, BD)
    o_k = tl.arange(0, BK).to(tl.int64)

    # [BQ, BD]
    p_q = head_block(x.q, x_strides.q, i_b, i_r, i_h, o_q, o_d)
    b_q = tl.load(p_q, mask=m_qd, other=0.0)
    p_grad = head_block(x.grad, x_strides.grad, i_b, i_r, i_h, o_q, o_d)
    b_grad = tl.load(p_grad, mask=m_qd, other=0.0)
    # [BQ]
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    b_lse = tl.load(x.lse + o_lse, mask=m_q, other=0.0)
    b_delta = tl.load(x.delta + o_lse, mask=m_q, other=0.0)
    p_k = head_of(x.k, x_strides.k, i_b, i_r, i_h)
    p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_q[:, None] * x_strides.bias[2], HAS_BIAS)
    o_bias = o_k[None, :] * x_strides.bias[3]
    if HAS_MASK:
        p_keep = x.keep + i_b * x_strides.keep[0] + i_r * x_strides.keep[1]

    step = tl.full([], BK, tl.int64)
    b_grad_q = tl.zeros([BQ, BD], tl.float32)
    for i_k in range(0, keys, BK):
        b_keep = o_k < keys - i_k
        m_kd = b_keep[:, None] & m_d[None, :]
        # [BK, BD]
        b_k = tl.load(positions(p_k, x_strides.k, o_k, o_d), mask=m_kd, other=0.0)
        b_v = tl.load(positions(p_v, x_strides.v, o_k, o_d), mask=m_kd, other=0.0)
        b_s = scores(b_q, b_k, scale, p_bias, o_bias, m_q[:, None] & b_keep[None, :], HAS_BIAS, PRECISION)
        if HAS_MASK:
            # [BK]
            b_keep = tl.load(p_keep + o_k * x_strides.keep[2], mask=b_keep, other=0) != 0
        b_dp = dot(b_grad, tl.trans(b_v), PRECISION)
        _, b_ds = weights_and_gradients(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], b_keep[None, :], keys, HAS_MASK
        )
        b_grad_q += dot(cast(b_ds, b_k.dtype), b_k, PRECISION)
        p_k += step * x_strides.k[2]
        p_v += step * x_strides.v[2]
        if HAS_BIAS:
            p_bias += step * x_strides.bias[3]
        if HAS_MASK:
            p_keep += step * x_strides.keep[2]

    p_grad_q = head_block(grad_q, grad_q_strides, i_b, i_r, i_h, o_q, o_d)
    tl.store(p_grad_q, cast(b_grad_q * scale, grad_q.dtype.element_ty), mask=m_qd)


@triton.jit(do_not_specialize=SIZES)
def attention_grad_kv_kernel(
    x, grad_k, grad_v, scale, heads, rows, queries, keys, x_strides, grad_k_strides, grad_v_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns a block of keys of one row and head, and walks over the queries.

    Scores are made with the keys first, as the products of the gradients need them.
    """
    i_k, i_r, i_h, i_b = program_row(tl.cdiv(keys, BK), rows, heads)
    o_k, o_d, m_k, m_d, m_kd = own_block(i_k, keys, D, BK, BD)
    o_q = tl.arange(0, BQ).to(tl.int64)

    # [BK, BD]
    p_k = head_block(x.k, x_strides.k, i_b, i_r, i_h, o_k, o_d)
    b_k = tl.load(p_k, mask=m_kd, other=0.0)
    p_v = head_block(x.v, x_strides.v, i_b, i_r, i_h, o_k, o_d)
    b_v = tl.load(p_v, mask=m_kd, other=0.0)
    b_keep = m_k
    if HAS_MASK:
        # [BK]
        p_keep = x.keep + i_b * x_strides.keep[0] + i_r * x_strides.keep[1] + o_k * x_strides.keep[2]
        b_keep = tl.load(p_keep, mask=m_k, other=0) != 0
    p_q = head_of(x.q, x_strides.q, i_b, i_r, i_h)
    p_grad = head_of(x.grad, x_strides.grad, i_b, i_r, i_h)
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_k[:, None] * x_strides.bias[3], HAS_BIAS)
    o_bias = o_q[None, :] * x_strides.bias[2]
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q

    step = tl.full([], BQ, tl.int64)
    b_grad_k = tl.zeros([BK, BD], tl.float32)
    b_grad_v = tl.zeros([BK, BD], tl.float32)
    for i_q in range(0, queries, BQ):
        m_q = o_q < queries - i_q
        m_qd = m_q[:, None] & m_d[None, :]
        # [BQ, BD]
        b_q = tl.load(positions(p_q, x_strides.q, o_q, o_d), mask=m_qd, other=0.0)
        b_grad = tl.load(positions(p_grad, x_strides.grad, o_q, o_d), mask=m_qd, other=0.0)
        # [BQ]; queries past the end have the gradient 0
        b_lse = tl.load(x.lse + i_q + o_lse, mask=m_q, other=0.0)
        b_delta = tl.load(x.delta + i_q + o_lse, mask=m_q, other=0.0)
        b_s = scores(b_k, b_q, scale, p_bias, o_bias, m_k[:, None] & m_q[None, :], HAS_BIAS, PRECISION)
        b_dp = dot(b_v, tl.trans(b_grad), PRECISION)
        b_p, b_ds = weights_and_gradients(
            b_s, b_dp, b_lse[None, :], b_delta[None, :], b_keep[:, None], keys, HAS_MASK
        )
        b_grad_v += dot(cast(b_p, b_grad.dtype), b_grad, PRECISION)
        b_grad_k += dot(cast(b_ds, b_q.dtype), b_q, PRECISION)
        p_q += step * x_strides.q[2]
        p_grad += step * x_strides.grad[2]
        if HAS_BIAS:
            p_bias += step * x_strides.bias[2]

    p_grad_k = head_block(grad_k, grad_k_strides, i_b, i_r, i_h, o_k, o_d)
    tl.store(p_grad_k, cast(b_grad_k * scale, grad_k.dtype.element_ty), mask=m_kd)
    p_grad_v = head_block(grad_v, grad_v_strides, i_b, i_r, i_h, o_k, o_d)
    tl.store(p_grad_v, cast(b_grad_v, grad_v.dtype.element_ty), mask=m_kd)


@triton.jit(do_not_specialize=[*SIZES, "row_step"])
def attention_grad_bias_kernel(
    x, grad_bias, scale, heads, rows, queries, keys, row_step, x_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns a block of queries and keys of one head, and walks over ``row_step`` rows.

    ``grad_bias [S, B, H, Nq, Nk]`` has a part for each of the S groups of rows.
    """
    i_p = tl.program_id(0)
    n_q = tl.cdiv(queries, BQ)
    n_k = tl.cdiv(keys, BK)
    i_k = i_p % n_k
    i_q = i_p // n_k % n_q
    i_h = (i_p // n_k // n_q % heads).to(tl.int64)
    i_sb = i_p // n_k // n_q // heads
    n_s = tl.cdiv(rows, row_step)
    i_s = i_sb % n_s
    i_b = (i_sb // n_s).to(tl.int64)
    o_q, o_d, m_q, _, m_qd = own_block(i_q, queries, D, BQ, BD)
    o_k, _, m_k, _, m_kd = own_block(i_k, keys, D, BK, BD)
    m_qk = m_q[:, None] & m_k[None, :]

    # [BQ, BK]
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_q[:, None] * x_strides.bias[2], True)
    b_bias = tl.load(p_bias + o_k[None, :] * x_strides.bias[3], mask=m_qk, other=0.0).to(tl.float32) * LOG2E
    i_r = (i_s * row_step).to(tl.int64)
    p_q = head_of(x.q, x_strides.q, i_b, i_r, i_h)
    p_k = head_of(x.k, x_strides.k, i_b, i_r, i_h)
    p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
    p_grad = head_of(x.grad, x_strides.grad, i_b, i_r, i_h)
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    b_keep = m_k
    if HAS_MASK:
        p_keep = x.keep + i_b * x_strides.keep[0] + i_r * x_strides.keep[1]

    b_grad_bias = tl.zeros([BQ, BK], tl.float32)
    for _ in range(0, min(row_step, rows - i_s * row_step)):
        # [BQ, BD]
        b_q = tl.load(positions(p_q, x_strides.q, o_q, o_d), mask=m_qd, other=0.0)
        b_grad = tl.load(positions(p_grad, x_strides.grad, o_q, o_d), mask=m_qd, other=0.0)
        # [BK, BD]
        b_k = tl.load(positions(p_k, x_strides.k, o_k, o_d), mask=m_kd, other=0.0)
        b_v = tl.load(positions(p_v, x_strides.v, o_k, o_d), mask=m_kd, other=0.0)
        # [BQ]
        b_lse = tl.load(x.lse + o_lse, mask=m_q, other=0.0)
        b_delta = tl.load(x.delta + o_lse, mask=m_q, other=0.0)
        if HAS_MASK:
            # [BK]
            b_keep = tl.load(p_keep + o_k * x_strides.keep[2], mask=m_k, other=0) != 0
            p_keep += x_strides.keep[1]
        b_s = dot(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E) + b_bias
        b_dp = dot(b_grad, tl.trans(b_v), PRECISION)
        _, b_ds = weights_and_gradients(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], b_keep[None, :], keys, HAS_MASK
        )
        b_grad_bias += b_ds
        p_q += x_strides.q[1]
        p_k += x_strides.k[1]
        p_v += x_strides.v[1]
        p_grad += x_strides.grad[1]
        o_lse += queries

    n_b = tl.num_programs(0) // n_k // n_q // heads // n_s
    i_bh = (i_s.to(tl.int64) * n_b + i_b) * heads + i_h
    p_grad_bias = grad_bias + (i_bh * queries + o_q[:, None]) * keys + o_k[None, :]
    tl.store(p_grad_bias, b_grad_bias, mask=m_qk)
