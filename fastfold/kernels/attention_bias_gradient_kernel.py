"""Kernel of the gradient of attention's bias: programs own blocks of it and walk over the rows that share it."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from fastfold.kernels.attention_forward_triton import LOG2E, SIZES
from fastfold.kernels.attention_gradient_kernels import weights_and_gradients
from fastfold.kernels.triton_arithmetic import dot


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
