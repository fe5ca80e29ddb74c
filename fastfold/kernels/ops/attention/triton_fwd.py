"""Attention in Triton, forward: one pass over the keys with a running softmax; no score reaches memory."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import batched, innermost, padded, strides
from fastfold.kernels.common.triton_math import cast, dot, precision
from fastfold.kernels.common.tuning import LaunchConfig, launch_config
from fastfold.kernels.ops.attention.aot_variants import attention_specimens

LOG2E = tl.constexpr(1.4426950408889634)

# Score of a masked key: so low that no other score or bias comes near it, and finite, so that a block of masked
# keys is no special case. Keys past the end get minus infinity.
MASKED = tl.constexpr(-1e30)

SIZES = ["heads", "rows", "queries", "keys"]
"""Sizes that no kernel is specialised on: it is compiled once for all of them."""

SHORT = 16
"""Up to so many queries per row take the configuration ``short``."""


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    q,
    k,
    v,
    bias,
    mask,
    gate,
    out,
    lse,
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
    gate_b,
    gate_r,
    gate_n,
    gate_h,
    out_b,
    out_r,
    out_n,
    out_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns a block of queries of one row and head.

    Blocks of queries run fastest, then rows: programs that run together share keys and values, and all rows of a
    head find its bias in the cache.
    """
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
    o_k = tl.arange(0, BK).to(tl.int64)

    # [BQ, BD]
    p_q = q + i_b * q_b + i_r * q_r + i_h * q_h + o_q[:, None] * q_n + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q[:, None] & m_d[None, :], other=0.0)
    p_k = k + i_b * k_b + i_r * k_r + i_h * k_h
    p_v = v + i_b * v_b + i_r * v_r + i_h * v_h
    if HAS_BIAS:
        p_bias = bias + i_b * bias_b + i_h * bias_h + o_q[:, None] * bias_q
    if HAS_MASK:
        p_mask = mask + i_b * mask_b + i_r * mask_r

    step = tl.full([], BK, tl.int64)
    b_max = tl.full([BQ], MASKED, tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    b_out = tl.zeros([BQ, BD], tl.float32)
    for i_k in range(0, keys, BK):
        m_k = o_k < keys - i_k
        # [BK, BD]
        b_k = tl.load(p_k + o_k[:, None] * k_n + o_d[None, :], mask=m_k[:, None] & m_d[None, :], other=0.0)
        b_s = dot(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E)
        if HAS_BIAS:
            # [BQ, BK]
            b_bias = tl.load(p_bias + o_k[None, :] * bias_k, mask=m_q[:, None] & m_k[None, :], other=0.0)
            b_s += b_bias.to(tl.float32) * LOG2E
        if HAS_MASK:
            # [BK]
            b_keep = tl.load(p_mask + o_k * mask_n, mask=m_k, other=0) != 0
            b_s = tl.where(b_keep[None, :], b_s, tl.where(m_k, MASKED, -float("inf"))[None, :])
        else:
            b_s = tl.where(m_k[None, :], b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_old = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        # [BK, BD]
        b_v = tl.load(p_v + o_k[:, None] * v_n + o_d[None, :], mask=m_k[:, None] & m_d[None, :], other=0.0)
        b_out = b_out * b_old[:, None] + dot(cast(b_p, b_v.dtype), b_v, PRECISION)
        b_max = b_new
        p_k += step * k_n
        p_v += step * v_n
        if HAS_BIAS:
            p_bias += step * bias_k
        if HAS_MASK:
            p_mask += step * mask_n

    b_out = b_out / b_sum[:, None]
    b_lse = b_max + tl.log2(b_sum)
    if HAS_MASK:
        # Infinity tells the backward pass that all keys are masked and every weight is 1 / keys.
        b_lse = tl.where(b_max == MASKED, float("inf"), b_lse)
    i_bh = i_b * heads + i_h
    tl.store(lse + (i_bh * rows + i_r) * queries + o_q, b_lse, mask=m_q)
    m_out = m_q[:, None] & m_d[None, :]
    if HAS_GATE:
        p_gate = gate + i_b * gate_b + i_r * gate_r + i_h * gate_h + o_q[:, None] * gate_n + o_d[None, :]
        b_out *= tl.sigmoid(tl.load(p_gate, mask=m_out, other=0.0).to(tl.float32))
    p_out = out + i_b * out_b + i_r * out_r + i_h * out_h + o_q[:, None] * out_n + o_d[None, :]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_out)


class TritonOperands(NamedTuple):
    """What the kernels read: any strides, but channels innermost, and one leading axis.

    Attributes:
        q: ``[B, R, Nq, H, D]``.
        k: ``[B, R, Nk, H, D]``.
        v: ``[B, R, Nk, H, D]``.
        bias: ``[B, H, Nq, Nk]`` or None.
        keep: Bytes ``[B, R, Nk]``, 0 for keys to leave out, or None.
        gate: ``[B, R, Nq, H, D]`` or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    keep: Tensor | None
    gate: Tensor | None


def triton_operands(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None
) -> TritonOperands:
    """Arguments of the public function as the kernels read them."""
    q, k, v = (batched(innermost(x)) for x in (q, k, v))
    return TritonOperands(
        *(q, k, v),
        None if bias is None else batched(bias, 3),
        None if mask is None else batched((mask != 0).view(torch.uint8), 2),
        None if gate is None else batched(innermost(gate)),
    )


def config(kernel: str, q: Tensor) -> LaunchConfig:
    """Configuration for queries ``[B, R, Nq, H, D]``."""
    key = f"{TRITON_TYPES[q.dtype]}_{padded(q.shape[-1])}"
    return launch_config(kernel, f"{key}_short" if q.shape[2] <= SHORT else key, q.device)


def attend_triton(out: Tensor, operands: TritonOperands, scale: float) -> Tensor:
    """Fill ``out``, and return what the backward pass needs.

    Args:
        out: ``[B, R, Nq, H, D]``, any strides, but channels innermost.
        operands: What to read.
        scale: Factor of the scores.

    Returns:
        ``lse [B, H, R, Nq]`` in float32: log2 of the sum of a query's exponentials, infinite where all of its
        keys are masked.
    """
    q, k, v, bias, keep, gate = operands
    batch, rows, queries, heads, channels = q.shape
    lse = q.new_empty(batch, heads, rows, queries, dtype=torch.float32)
    chosen = config("attention_forward", q)
    programs = triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * batch
    if programs == 0 or channels == 0:
        return lse
    with torch.cuda.device_of(q):
        attention_forward_kernel[(programs,)](
            *(q, k, v, bias, keep, gate, out, lse),
            *(scale, heads, rows, queries, k.shape[2]),
            *(*strides(q, 4), *strides(k, 4), *strides(v, 4)),
            *(*strides(bias, 4), *strides(keep, 3), *strides(gate, 4), *strides(out, 4)),
            D=channels,
            BD=padded(channels),
            HAS_BIAS=bias is not None,
            HAS_MASK=keep is not None,
            HAS_GATE=gate is not None,
            PRECISION=precision(q),
            **chosen.launch,
        )
    return lse


def specimens() -> list[Specimen]:
    """The forward kernel for every dtype, channels and shipped configuration."""
    return attention_specimens([attention_forward_kernel])
