"""Attention in Triton, backward: weights are recomputed from the saved sums of exponentials.

Every gradient has a kernel whose programs own blocks of it: the queries' walks over the keys, the keys' and values'
over the queries, and the bias's over the rows. So no sum is atomic, and results are equal in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded, strides
from fastfold.kernels.common.triton_math import LOG2E, cast, dot, dot_plus, precision
from fastfold.kernels.ops.attention.triton_fwd import (
    SIZES,
    TritonOperands,
    bias_of,
    config,
    further,
    head_block,
    head_of,
    hidden_of,
    own_block,
    positions,
    program_row,
    row_part,
    scaled,
    scores,
)


@triton.jit(do_not_specialize=SIZES)
def attention_ungate_kernel(
    out, grad, gate, grad_out, grad_gate, delta, heads, rows, queries,
    out_strides, grad_strides, gate_strides, grad_gate_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Compute gradients before and of the gate, and ``delta``, the weighted mean of the weights' gradients."""
    i_p = tl.program_id(0)
    n_q = tl.cdiv(queries, BQ)
    # Heads run fastest: programs that run together read the same memory lines.
    i_h = (i_p % heads).to(tl.int64)
    i_q = i_p // heads % n_q
    i_r = (i_p // heads // n_q % rows).to(tl.int64)
    i_b = (i_p // heads // n_q // rows).to(tl.int64)
    o_q, o_d, m_q, _, m_qd = own_block(i_q, queries, D, BQ, BD)

    # [BQ, BD]
    p_out = head_block(out, out_strides, i_b, i_r, i_h, o_q, o_d)
    b_out = tl.load(p_out, mask=m_qd, other=0.0).to(tl.float32)
    p_grad = head_block(grad, grad_strides, i_b, i_r, i_h, o_q, o_d)
    b_grad = tl.load(p_grad, mask=m_qd, other=0.0).to(tl.float32)
    if HAS_GATE:
        p_gate = head_block(gate, gate_strides, i_b, i_r, i_h, o_q, o_d)
        b_gate = tl.sigmoid(tl.load(p_gate, mask=m_qd, other=0.0).to(tl.float32))
        p_grad_gate = head_block(grad_gate, grad_gate_strides, i_b, i_r, i_h, o_q, o_d)
        tl.store(p_grad_gate, cast(b_out * b_grad * (1.0 - b_gate), grad_gate.dtype.element_ty), mask=m_qd)
        b_rounded = cast(b_grad * b_gate, grad_out.dtype.element_ty)
        # [B, R, Nq, H, D] without gaps
        o_out = (((i_b * rows + i_r) * queries + o_q[:, None]) * heads + i_h) * D
        p_grad_out = grad_out + o_out + o_d[None, :]
        tl.store(p_grad_out, b_rounded, mask=m_qd)
        # The other kernels subtract the mean from rounded gradients, so it must be their mean.
        b_out = tl.where(b_gate > 0.0, b_out / b_gate, 0.0)
        b_grad = b_rounded.to(tl.float32)
    p_delta = delta + ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    tl.store(p_delta, tl.sum(b_out * b_grad, 1), mask=m_q)


@triton.jit
def weights_and_gradients(b_s, b_dp, b_lse, b_delta):
    """Compute weights, and gradients of their scores, from scores; arguments are broadcast. Masked keys get 0."""
    b_p = tl.exp2(b_s * LOG2E - b_lse)
    return b_p, b_p * (b_dp - b_delta)


@triton.jit
def grad_q_block(
    b_grad_q, b_q, b_grad, b_lse, b_delta, p_k, p_v, p_bias, p_hidden, k_step, v_step, o_k, o_d, m_q, m_d, left,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of a block of keys to the queries' gradient; ``left`` exist if CUT."""
    m_k = o_k < left
    m_kd = m_k[:, None] & m_d[None, :] if CUT else m_d[None, :]
    # [BK, BD]
    b_k = tl.load(p_k + o_k[:, None] * k_step + o_d[None, :], mask=m_kd, other=0.0)
    b_v = tl.load(p_v + o_k[:, None] * v_step + o_d[None, :], mask=m_kd, other=0.0)
    b_s = scores(b_q, b_k, p_bias, p_hidden, o_k, m_q, left, HAS_BIAS, HAS_MASK, CUT, PRECISION)
    b_dp = dot(b_grad, tl.trans(b_v), PRECISION)
    _, b_ds = weights_and_gradients(b_s, b_dp, b_lse[:, None], b_delta[:, None])
    return dot(cast(b_ds, b_k.dtype), b_k, PRECISION, b_grad_q)


@triton.jit(do_not_specialize=SIZES)
def attention_grad_q_kernel(
    x, grad_q, scale, heads, rows, queries, keys, x_strides, grad_q_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the queries' gradient: a program owns queries of one row and head, and walks over the keys."""
    i_q, i_r, i_h, i_b = program_row(tl.cdiv(queries, BQ), rows, heads)
    o_q, o_d, m_q, m_d, m_qd = own_block(i_q, queries, D, BQ, BD)
    o_k = tl.arange(0, BK).to(tl.int64)

    # [BQ, BD]
    p_q = head_block(x.q, x_strides.q, i_b, i_r, i_h, o_q, o_d)
    b_q = scaled(tl.load(p_q, mask=m_qd, other=0.0), scale)
    p_grad = head_block(x.grad, x_strides.grad, i_b, i_r, i_h, o_q, o_d)
    b_grad = tl.load(p_grad, mask=m_qd, other=0.0)
    # [BQ]
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    b_lse = tl.load(x.lse + o_lse, mask=m_q, other=0.0)
    b_delta = tl.load(x.delta + o_lse, mask=m_q, other=0.0)
    p_k = head_of(x.k, x_strides.k, i_b, i_r, i_h)
    p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_q[:, None] * x_strides.bias[2], HAS_BIAS)
    p_hidden = hidden_of(x.hidden, x_strides.hidden, i_b, i_r, HAS_MASK)

    k_step, v_step = x_strides.k[2], x_strides.v[2]
    step = tl.full([], BK, tl.int64)
    b_grad_q = tl.zeros([BQ, BD], tl.float32)
    if keys % BK:
        whole = (keys - keys % BK).to(tl.int64)
        b_grad_q = grad_q_block(
            b_grad_q, b_q, b_grad, b_lse, b_delta, p_k + whole * k_step, p_v + whole * v_step,
            further(p_bias, whole, HAS_BIAS), further(p_hidden, whole, HAS_MASK), k_step, v_step, o_k, o_d, m_q, m_d,
            keys % BK, HAS_BIAS, HAS_MASK, True, PRECISION,
        )  # fmt: skip
    for _ in range(0, keys // BK):
        b_grad_q = grad_q_block(
            b_grad_q, b_q, b_grad, b_lse, b_delta, p_k, p_v, p_bias, p_hidden, k_step, v_step, o_k, o_d, m_q, m_d, BK,
            HAS_BIAS, HAS_MASK, False, PRECISION,
        )  # fmt: skip
        p_k += step * k_step
        p_v += step * v_step
        if HAS_BIAS:
            p_bias += BK
        if HAS_MASK:
            p_hidden += BK

    p_grad_q = head_block(grad_q, grad_q_strides, i_b, i_r, i_h, o_q, o_d)
    tl.store(p_grad_q, cast(b_grad_q * scale, grad_q.dtype.element_ty), mask=m_qd)


@triton.jit
def grad_kv_block(
    b_grad_k, b_grad_v, b_k, b_v, p_q, p_grad, p_bias, p_lse, p_delta, q_step, grad_step, bias_step, o_q, o_d,
    m_row, m_d, left, HAS_BIAS: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of a block of queries to gradients of keys and values; ``left`` exist if CUT."""
    # Scores are computed with the keys first, as the products of the gradients need them.
    m_q = o_q < left
    m_qd = m_q[:, None] & m_d[None, :] if CUT else m_d[None, :]
    # [BQ, BD]
    b_q = tl.load(p_q + o_q[:, None] * q_step + o_d[None, :], mask=m_qd, other=0.0)
    b_grad = tl.load(p_grad + o_q[:, None] * grad_step + o_d[None, :], mask=m_qd, other=0.0)
    # [BQ]; queries past the end have the weight 0
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=float("inf")) if CUT else tl.load(p_lse + o_q)
    b_delta = tl.load(p_delta + o_q, mask=m_q, other=0.0) if CUT else tl.load(p_delta + o_q)
    if HAS_BIAS:
        # [BK, BQ]
        p_block = p_bias + o_q[None, :] * bias_step
        b_bias = tl.load(p_block, mask=m_row[:, None] & m_q[None, :] if CUT else m_row[:, None], other=0.0)
        b_s = dot_plus(b_k, tl.trans(b_q), b_bias.to(tl.float32), PRECISION)
    else:
        b_s = dot(b_k, tl.trans(b_q), PRECISION)
    b_dp = dot(b_v, tl.trans(b_grad), PRECISION)
    b_p, b_ds = weights_and_gradients(b_s, b_dp, b_lse[None, :], b_delta[None, :])
    b_grad_v = dot(cast(b_p, b_grad.dtype), b_grad, PRECISION, b_grad_v)
    return dot(cast(b_ds, b_q.dtype), b_q, PRECISION, b_grad_k), b_grad_v


@triton.jit(do_not_specialize=SIZES)
def attention_grad_kv_kernel(
    x, grad_k, grad_v, scale, heads, rows, queries, keys, x_strides, grad_k_strides, grad_v_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of keys and values: a program owns keys of one row and head, and walks over the queries."""
    i_k, i_r, i_h, i_b = program_row(tl.cdiv(keys, BK), rows, heads)
    o_k, o_d, _, m_d, m_kd = own_block(i_k, keys, D, BK, BD)
    o_q = tl.arange(0, BQ).to(tl.int64)

    # [BK, BD]
    p_k = head_block(x.k, x_strides.k, i_b, i_r, i_h, o_k, o_d)
    b_k = scaled(tl.load(p_k, mask=m_kd, other=0.0), scale)
    p_v = head_block(x.v, x_strides.v, i_b, i_r, i_h, o_k, o_d)
    b_v = tl.load(p_v, mask=m_kd, other=0.0)
    p_q = head_of(x.q, x_strides.q, i_b, i_r, i_h)
    p_grad = head_of(x.grad, x_strides.grad, i_b, i_r, i_h)
    bias_step, m_row = x_strides.bias[2], row_part(o_k, keys)
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_k[:, None], HAS_BIAS)
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries
    p_lse = x.lse + o_lse
    p_delta = x.delta + o_lse

    q_step, grad_step = x_strides.q[2], x_strides.grad[2]
    step = tl.full([], BQ, tl.int64)
    b_grad_k = tl.zeros([BK, BD], tl.float32)
    b_grad_v = tl.zeros([BK, BD], tl.float32)
    if queries % BQ:
        whole = (queries - queries % BQ).to(tl.int64)
        b_grad_k, b_grad_v = grad_kv_block(
            b_grad_k, b_grad_v, b_k, b_v, p_q + whole * q_step, p_grad + whole * grad_step,
            further(p_bias, whole * bias_step, HAS_BIAS), p_lse + whole, p_delta + whole, q_step, grad_step, bias_step,
            o_q, o_d, m_row, m_d, queries % BQ, HAS_BIAS, True, PRECISION,
        )  # fmt: skip
    for _ in range(0, queries // BQ):
        b_grad_k, b_grad_v = grad_kv_block(
            b_grad_k, b_grad_v, b_k, b_v, p_q, p_grad, p_bias, p_lse, p_delta, q_step, grad_step, bias_step, o_q, o_d,
            m_row, m_d, BQ, HAS_BIAS, False, PRECISION,
        )  # fmt: skip
        p_q += step * q_step
        p_grad += step * grad_step
        p_lse += BQ
        p_delta += BQ
        if HAS_BIAS:
            p_bias += step * bias_step

    if HAS_MASK:
        # A masked key does not affect other keys' gradients, so its own can be set to zero at the end.
        p_hidden = hidden_of(x.hidden, x_strides.hidden, i_b, i_r, HAS_MASK)
        m_used = tl.load(p_hidden + o_k, mask=m_row, other=0.0) == 0.0
        b_grad_k = tl.where(m_used[:, None], b_grad_k, 0.0)
        b_grad_v = tl.where(m_used[:, None], b_grad_v, 0.0)
        if tl.load(x.lse + o_lse) == float("inf"):
            # All keys of the row are masked, and every weight is 1 / keys.
            p_grad = head_of(x.grad, x_strides.grad, i_b, i_r, i_h)
            for i_q in range(0, queries, BQ):
                m_qd = (o_q < queries - i_q)[:, None] & m_d[None, :]
                b_grad = tl.load(p_grad + o_q[:, None] * grad_step + o_d[None, :], mask=m_qd, other=0.0)
                b_grad_v += (tl.sum(b_grad.to(tl.float32), 0) / keys)[None, :]
                p_grad += step * grad_step
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
    """Compute the bias's gradient."""
    # A program owns queries and keys of one head, and walks over ``row_step`` rows. ``grad_bias [S, B, H, Nq, Nk]``
    # has a part for each of the S groups of rows.
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
    m_row = row_part(o_k, keys)

    # [BQ, BK]
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_q[:, None] * x_strides.bias[2], True)
    b_bias = (
        tl.load(p_bias + o_k[None, :], mask=m_q[:, None] & m_row[None, :], other=0.0).to(tl.float32) * LOG2E
    )
    i_r = (i_s * row_step).to(tl.int64)
    p_q = head_of(x.q, x_strides.q, i_b, i_r, i_h)
    p_k = head_of(x.k, x_strides.k, i_b, i_r, i_h)
    p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
    p_grad = head_of(x.grad, x_strides.grad, i_b, i_r, i_h)
    o_lse = ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    p_hidden = hidden_of(x.hidden, x_strides.hidden, i_b, i_r, HAS_MASK)

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
        b_s = dot(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E) + b_bias
        if HAS_MASK:
            # [BK]
            b_s += tl.load(p_hidden + o_k, mask=m_row, other=0.0).to(tl.float32)[None, :]
            p_hidden += x_strides.hidden[1]
        b_dp = dot(b_grad, tl.trans(b_v), PRECISION)
        b_grad_bias += tl.exp2(b_s - b_lse[:, None]) * (b_dp - b_delta[:, None])
        p_q += x_strides.q[1]
        p_k += x_strides.k[1]
        p_v += x_strides.v[1]
        p_grad += x_strides.grad[1]
        o_lse += queries

    n_b = tl.num_programs(0) // n_k // n_q // heads // n_s
    i_bh = (i_s.to(tl.int64) * n_b + i_b) * heads + i_h
    p_grad_bias = grad_bias + (i_bh * queries + o_q[:, None]) * keys + o_k[None, :]
    tl.store(p_grad_bias, b_grad_bias, mask=m_q[:, None] & m_k[None, :])


class BackwardOperands(NamedTuple):
    """Operands of the gradient kernels, or their strides; the first five are those of :class:`TritonOperands`."""

    q: Any
    k: Any
    v: Any
    bias: Any
    hidden: Any
    grad: Any  #: ``[B, R, Nq, H, D]``, gradient of the output before the gate
    lse: Any = None  #: ``[B, H, R, Nq]`` in float32, without gaps
    delta: Any = None  #: Weighted mean of the weights' gradients, as ``lse``


class Gradients(NamedTuple):
    """Tensors to fill, in the operands' shapes, channels innermost; the gate's is None without a gate."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None


def attend_backward_triton(
    grad: Tensor,
    operands: TritonOperands,
    out: Tensor,
    lse: Tensor,
    grads: Gradients,
    scale: float,
    need_bias: bool,
) -> Tensor | None:
    """Fill the gradients of :func:`attend_triton`, from that of its output ``[B, R, Nq, H, D]``, channels innermost.

    ``out`` and the sums of exponentials are the results of the forward pass. The bias's gradient, ``[B, H, Nq, Nk]`` in
    float32, is returned, or None if it is not needed.
    """
    q, k, _, bias, hidden, gate = operands
    batch, rows, queries, heads, channels = q.shape
    keys = k.shape[2]
    sizes: dict[str, Any] = {"D": channels, "BD": padded(channels)}
    delta = torch.empty_like(lse)
    chosen = config("attention_ungate", q)
    programs = triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * batch
    if programs == 0 or channels == 0:
        return None if bias is None or not need_bias else bias.new_zeros(bias.shape, dtype=torch.float32)
    grad_out = grad if gate is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    launch(attention_ungate_kernel, (programs,))(
        *(out, grad, gate, grad_out, grads.gate, delta, heads, rows, queries),
        *(strides(out, 4), strides(grad, 4), strides(gate, 4), strides(grads.gate, 4)),
        **sizes,
        HAS_GATE=gate is not None,
        **chosen.launch,
    )
    read = BackwardOperands(*operands.pointers[:5], grad_out, lse, delta)
    of = operands.strides
    read_strides = BackwardOperands(of.q, of.k, of.v, of.bias, of.hidden, strides(grad_out, 4))
    numbers = (scale, heads, rows, queries, keys)
    sizes |= {"HAS_MASK": hidden is not None}
    chosen = config("attention_grad_q", q)
    launch(attention_grad_q_kernel, (triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * batch,))(
        *(read, grads.q, *numbers, read_strides, strides(grads.q, 4)),
        **sizes,
        HAS_BIAS=bias is not None,
        PRECISION=precision(q, chosen),
        **chosen.launch,
    )
    chosen = config("attention_grad_kv", q)
    launch(attention_grad_kv_kernel, (triton.cdiv(keys, chosen.blocks["BK"]) * rows * heads * batch,))(
        *(read, grads.k, grads.v, *numbers, read_strides, strides(grads.k, 4), strides(grads.v, 4)),
        **sizes,
        HAS_BIAS=bias is not None,
        PRECISION=precision(q, chosen),
        **chosen.launch,
    )
    if bias is None or not need_bias:
        return None
    chosen = config("attention_grad_bias", q)
    blocks = (
        triton.cdiv(queries, chosen.blocks["BQ"]) * triton.cdiv(keys, chosen.blocks["BK"]) * heads * batch
    )
    groups = min(rows, row_groups(blocks, q.device))
    row_step = triton.cdiv(rows, groups)
    groups = triton.cdiv(rows, row_step)
    parts = q.new_empty(groups, batch, heads, queries, keys, dtype=torch.float32)
    launch(attention_grad_bias_kernel, (blocks * groups,))(
        *(read, parts, *numbers, row_step, read_strides),
        **sizes,
        PRECISION=precision(q, chosen),
        **chosen.launch,
    )
    return parts[0] if groups == 1 else parts.sum(0)


def row_groups(blocks: int, device: torch.device) -> int:
    """Return the number of groups of rows whose bias gradients are summed apart, to fill the GPU."""
    # At most 8, because memory grows with the number.
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    return max(1, min(8, 4 * processors // blocks))
