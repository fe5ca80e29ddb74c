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
from fastfold.kernels.ops.attention.triton_fwd import LOG2E, SIZES


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
    q,
    k,
    v,
    bias,
    mask,
    grad,
    lse,
    delta,
    grad_q,
    scale,
    heads,
    rows,
    queries,
    keys,
    q_b,
    q_r,
    q_n,
    q_h,
    k_b,
    k_r,
    k_n,
    k_h,
    v_b,
    v_r,
    v_n,
    v_h,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    mask_b,
    mask_r,
    mask_n,
    grad_b,
    grad_r,
    grad_n,
    grad_h,
    grad_q_b,
    grad_q_r,
    grad_q_n,
    grad_q_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns a block of queries of one row and head, and walks over the keys."""
    i_p = tl.program_id(0)
    n_q = tl.cdiv(queries, BQ)
    i_q = i_p % n_q
    i_r = (i_p // n_q % rows).to(tl.int64)
    i_h = (i_p // n_q // rows % heads).to(tl.int64)
    i_b = (i_p // n_q // rows // heads).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_q = i_q.to(tl.int64) * BQ + tl.arange(0, BQ)
    m_q = o_q < queries
    m_qd = m_q[:, None] & m_d[None, :]
    o_k = tl.arange(0, BK).to(tl.int64)

    # [BQ, BD]
    p_q = q + i_b * q_b + i_r * q_r + i_h * q_h + o_q[:, None] * q_n + o_d[None, :]
    b_q = tl.load(p_q, mask=m_qd, other=0.0)
    p_grad = grad + i_b * grad_b + i_r * grad_r + i_h * grad_h + o_q[:, None] * grad_n + o_d[None, :]
    b_grad = tl.load(p_grad, mask=m_qd, other=0.0)
    # [BQ]
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    b_lse = tl.load(lse + o_lse, mask=m_q, other=0.0)
    b_delta = tl.load(delta + o_lse, mask=m_q, other=0.0)
    p_k = k + i_b * k_b + i_r * k_r + i_h * k_h
    p_v = v + i_b * v_b + i_r * v_r + i_h * v_h
    if HAS_BIAS:
        p_bias = bias + i_b * bias_b + i_h * bias_h + o_q[:, None] * bias_q
    if HAS_MASK:
        p_mask = mask + i_b * mask_b + i_r * mask_r

    step = tl.full([], BK, tl.int64)
    b_grad_q = tl.zeros([BQ, BD], tl.float32)
    for i_k in range(0, keys, BK):
        b_keep = o_k < keys - i_k
        m_kd = b_keep[:, None] & m_d[None, :]
        # [BK, BD]
        b_k = tl.load(p_k + o_k[:, None] * k_n + o_d[None, :], mask=m_kd, other=0.0)
        b_v = tl.load(p_v + o_k[:, None] * v_n + o_d[None, :], mask=m_kd, other=0.0)
        b_s = dot(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E)
        if HAS_BIAS:
            # [BQ, BK]
            m_bias = m_q[:, None] & b_keep[None, :]
            b_bias = tl.load(p_bias + o_k[None, :] * bias_k, mask=m_bias, other=0.0)
            b_s += b_bias.to(tl.float32) * LOG2E
        if HAS_MASK:
            # [BK]
            b_keep = tl.load(p_mask + o_k * mask_n, mask=b_keep, other=0) != 0
        b_dp = dot(b_grad, tl.trans(b_v), PRECISION)
        _, b_ds = weights_and_gradients(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], b_keep[None, :], keys, HAS_MASK
        )
        b_grad_q += dot(cast(b_ds, b_k.dtype), b_k, PRECISION)
        p_k += step * k_n
        p_v += step * v_n
        if HAS_BIAS:
            p_bias += step * bias_k
        if HAS_MASK:
            p_mask += step * mask_n

    p_grad_q = grad_q + i_b * grad_q_b + i_r * grad_q_r + i_h * grad_q_h
    p_grad_q += o_q[:, None] * grad_q_n + o_d[None, :]
    tl.store(p_grad_q, cast(b_grad_q * scale, grad_q.dtype.element_ty), mask=m_qd)


@triton.jit(do_not_specialize=SIZES)
def attention_grad_kv_kernel(
    q,
    k,
    v,
    bias,
    mask,
    grad,
    lse,
    delta,
    grad_k,
    grad_v,
    scale,
    heads,
    rows,
    queries,
    keys,
    q_b,
    q_r,
    q_n,
    q_h,
    k_b,
    k_r,
    k_n,
    k_h,
    v_b,
    v_r,
    v_n,
    v_h,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    mask_b,
    mask_r,
    mask_n,
    grad_b,
    grad_r,
    grad_n,
    grad_h,
    grad_k_b,
    grad_k_r,
    grad_k_n,
    grad_k_h,
    grad_v_b,
    grad_v_r,
    grad_v_n,
    grad_v_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns a block of keys of one row and head, and walks over the queries.

    Scores are made with the keys first, as the products of the gradients need them.
    """
    i_p = tl.program_id(0)
    n_k = tl.cdiv(keys, BK)
    i_k = i_p % n_k
    i_r = (i_p // n_k % rows).to(tl.int64)
    i_h = (i_p // n_k // rows % heads).to(tl.int64)
    i_b = (i_p // n_k // rows // heads).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_k = i_k.to(tl.int64) * BK + tl.arange(0, BK)
    m_k = o_k < keys
    m_kd = m_k[:, None] & m_d[None, :]
    o_q = tl.arange(0, BQ).to(tl.int64)

    # [BK, BD]
    p_k = k + i_b * k_b + i_r * k_r + i_h * k_h + o_k[:, None] * k_n + o_d[None, :]
    b_k = tl.load(p_k, mask=m_kd, other=0.0)
    p_v = v + i_b * v_b + i_r * v_r + i_h * v_h + o_k[:, None] * v_n + o_d[None, :]
    b_v = tl.load(p_v, mask=m_kd, other=0.0)
    b_keep = m_k
    if HAS_MASK:
        # [BK]
        b_keep = tl.load(mask + i_b * mask_b + i_r * mask_r + o_k * mask_n, mask=m_k, other=0) != 0
    p_q = q + i_b * q_b + i_r * q_r + i_h * q_h
    p_grad = grad + i_b * grad_b + i_r * grad_r + i_h * grad_h
    if HAS_BIAS:
        p_bias = bias + i_b * bias_b + i_h * bias_h + o_k[:, None] * bias_k
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q

    step = tl.full([], BQ, tl.int64)
    b_grad_k = tl.zeros([BK, BD], tl.float32)
    b_grad_v = tl.zeros([BK, BD], tl.float32)
    for i_q in range(0, queries, BQ):
        m_q = o_q < queries - i_q
        m_qd = m_q[:, None] & m_d[None, :]
        # [BQ, BD]
        b_q = tl.load(p_q + o_q[:, None] * q_n + o_d[None, :], mask=m_qd, other=0.0)
        b_grad = tl.load(p_grad + o_q[:, None] * grad_n + o_d[None, :], mask=m_qd, other=0.0)
        # [BQ]; queries past the end have the gradient 0
        b_lse = tl.load(lse + i_q + o_lse, mask=m_q, other=0.0)
        b_delta = tl.load(delta + i_q + o_lse, mask=m_q, other=0.0)
        b_s = dot(b_k, tl.trans(b_q), PRECISION) * (scale * LOG2E)
        if HAS_BIAS:
            # [BK, BQ]
            m_bias = m_k[:, None] & m_q[None, :]
            b_bias = tl.load(p_bias + o_q[None, :] * bias_q, mask=m_bias, other=0.0)
            b_s += b_bias.to(tl.float32) * LOG2E
        b_dp = dot(b_v, tl.trans(b_grad), PRECISION)
        b_p, b_ds = weights_and_gradients(
            b_s, b_dp, b_lse[None, :], b_delta[None, :], b_keep[:, None], keys, HAS_MASK
        )
        b_grad_v += dot(cast(b_p, b_grad.dtype), b_grad, PRECISION)
        b_grad_k += dot(cast(b_ds, b_q.dtype), b_q, PRECISION)
        p_q += step * q_n
        p_grad += step * grad_n
        if HAS_BIAS:
            p_bias += step * bias_q

    p_grad_k = grad_k + i_b * grad_k_b + i_r * grad_k_r + i_h * grad_k_h
    p_grad_k += o_k[:, None] * grad_k_n + o_d[None, :]
    tl.store(p_grad_k, cast(b_grad_k * scale, grad_k.dtype.element_ty), mask=m_kd)
    p_grad_v = grad_v + i_b * grad_v_b + i_r * grad_v_r + i_h * grad_v_h
    p_grad_v += o_k[:, None] * grad_v_n + o_d[None, :]
    tl.store(p_grad_v, cast(b_grad_v, grad_v.dtype.element_ty), mask=m_kd)


@triton.jit(do_not_specialize=[*SIZES, "row_step"])
def attention_grad_bias_kernel(
    q,
    k,
    v,
    bias,
    mask,
    grad,
    lse,
    delta,
    grad_bias,
    scale,
    heads,
    rows,
    queries,
    keys,
    row_step,
    q_b,
    q_r,
    q_n,
    q_h,
    k_b,
    k_r,
    k_n,
    k_h,
    v_b,
    v_r,
    v_n,
    v_h,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    mask_b,
    mask_r,
    mask_n,
    grad_b,
    grad_r,
    grad_n,
    grad_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_q = i_q.to(tl.int64) * BQ + tl.arange(0, BQ)
    o_k = i_k.to(tl.int64) * BK + tl.arange(0, BK)
    m_q = o_q < queries
    m_k = o_k < keys
    m_qd = m_q[:, None] & m_d[None, :]
    m_kd = m_k[:, None] & m_d[None, :]
    m_qk = m_q[:, None] & m_k[None, :]

    # [BQ, BK]
    p_bias = bias + i_b * bias_b + i_h * bias_h + o_q[:, None] * bias_q + o_k[None, :] * bias_k
    b_bias = tl.load(p_bias, mask=m_qk, other=0.0).to(tl.float32) * LOG2E
    i_r = (i_s * row_step).to(tl.int64)
    p_q = q + i_b * q_b + i_r * q_r + i_h * q_h
    p_k = k + i_b * k_b + i_r * k_r + i_h * k_h
    p_v = v + i_b * v_b + i_r * v_r + i_h * v_h
    p_grad = grad + i_b * grad_b + i_r * grad_r + i_h * grad_h
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    b_keep = m_k
    if HAS_MASK:
        p_mask = mask + i_b * mask_b + i_r * mask_r

    b_grad_bias = tl.zeros([BQ, BK], tl.float32)
    for _ in range(0, min(row_step, rows - i_s * row_step)):
        # [BQ, BD]
        b_q = tl.load(p_q + o_q[:, None] * q_n + o_d[None, :], mask=m_qd, other=0.0)
        b_grad = tl.load(p_grad + o_q[:, None] * grad_n + o_d[None, :], mask=m_qd, other=0.0)
        # [BK, BD]
        b_k = tl.load(p_k + o_k[:, None] * k_n + o_d[None, :], mask=m_kd, other=0.0)
        b_v = tl.load(p_v + o_k[:, None] * v_n + o_d[None, :], mask=m_kd, other=0.0)
        # [BQ]
        b_lse = tl.load(lse + o_lse, mask=m_q, other=0.0)
        b_delta = tl.load(delta + o_lse, mask=m_q, other=0.0)
        if HAS_MASK:
            # [BK]
            b_keep = tl.load(p_mask + o_k * mask_n, mask=m_k, other=0) != 0
            p_mask += mask_r
        b_s = dot(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E) + b_bias
        b_dp = dot(b_grad, tl.trans(b_v), PRECISION)
        _, b_ds = weights_and_gradients(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], b_keep[None, :], keys, HAS_MASK
        )
        b_grad_bias += b_ds
        p_q += q_r
        p_k += k_r
        p_v += v_r
        p_grad += grad_r
        o_lse += queries

    n_b = tl.num_programs(0) // n_k // n_q // heads // n_s
    i_bh = (i_s.to(tl.int64) * n_b + i_b) * heads + i_h
    p_grad_bias = grad_bias + (i_bh * queries + o_q[:, None]) * keys + o_k[None, :]
    tl.store(p_grad_bias, b_grad_bias, mask=m_qk)
