"""Attention in Triton, forward: one pass over the keys with a running softmax; no score reaches memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import batched, innermost, padded, strides
from fastfold.kernels.common.triton_math import LOG2E, cast, dot, dot_plus, plus, precision, products_suffix
from fastfold.kernels.common.tuning import TRITON_TYPES, LaunchConfig, launch_config

# Initial maximum of scores. It is finite, because masked keys have the score minus infinity, and minus infinity
# minus itself would be NaN. If it is still the maximum after all keys, all of them are masked.
LOWEST = tl.constexpr(-1e30)

SIZES = ["heads", "rows", "queries", "keys"]
"""Sizes that kernels are not specialised on: one compilation serves all of them."""

SHORT = 16  #: Maximum number of queries per row for the configuration ``short``


@triton.jit
def program_row(n_blocks, rows, heads):
    """Return the block of this program, and in int64 its row, head and batch element."""
    # Blocks run fastest, then rows: concurrent programs share the data that they walk over, and all rows of a head
    # find its bias in the cache.
    i_p = tl.program_id(0)
    i_r = (i_p // n_blocks % rows).to(tl.int64)
    i_h = (i_p // n_blocks // rows % heads).to(tl.int64)
    i_b = (i_p // n_blocks // rows // heads).to(tl.int64)
    return i_p % n_blocks, i_r, i_h, i_b


@triton.jit
def own_block(i_n, size, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Return a block's positions, a head's channels, and masks of existing positions, channels and both."""
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < size
    m_d = o_d < D
    return o_n, o_d, m_n, m_d, m_n[:, None] & m_d[None, :]


@triton.jit
def head_of(x, strides, i_b, i_r, i_h):
    """Return the pointer to a row and head of ``x [B, R, N, H, D]``."""
    return x + i_b * strides[0] + i_r * strides[1] + i_h * strides[3]


@triton.jit
def positions(p_x, strides, o_n, o_d):
    """Return pointers ``[BN, BD]`` to positions and channels of a row and head."""
    return p_x + o_n[:, None] * strides[2] + o_d[None, :]


@triton.jit
def head_block(x, strides, i_b, i_r, i_h, o_n, o_d):
    """Return pointers ``[BN, BD]`` to positions and channels of ``x [B, R, N, H, D]``."""
    return positions(head_of(x, strides, i_b, i_r, i_h), strides, o_n, o_d)


@triton.jit
def bias_of(bias, strides, i_b, i_h, o_own, HAS_BIAS: tl.constexpr):
    """Return pointers to a program's part of a head of ``bias [B, H, Nq, Nk]``; unused without a bias."""
    if HAS_BIAS:
        return bias + i_b * strides[0] + i_h * strides[1] + o_own
    else:
        return bias


@triton.jit
def hidden_of(hidden, strides, i_b, i_r, HAS_MASK: tl.constexpr):
    """Return the pointer to a row of ``hidden [B, R, Nk]``; unused without a mask."""
    if HAS_MASK:
        return hidden + i_b * strides[0] + i_r * strides[1]
    else:
        return hidden


@triton.jit
def further(p_x, offset, GIVEN: tl.constexpr):
    """Advance pointers by ``offset``; unused without a tensor."""
    # Kernels begin with the remaining keys or queries that fill no whole block. After the loop over whole blocks, the
    # remainder's operands would occupy registers during the loop.
    if GIVEN:
        return p_x + offset
    else:
        return p_x


@triton.jit
def row_part(o_k, keys):
    """Compute the mask of key slots in a row padded to a multiple of 16."""
    # `aligned` pads rows so, because whole multiples of 16 keep loads wide.
    return o_k < tl.cdiv(keys, 16) * 16


@triton.jit
def scaled(x, scale):
    """Multiply ``x`` by the factor of the scores, in its dtype, so that products can start from the bias."""
    return cast(x.to(tl.float32) * scale, x.dtype)


@triton.jit
def scores(
    b_q, b_k, p_bias, p_hidden, o_k, m_q, left,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute scores ``[BQ, BK]`` of scaled queries ``[BQ, BD]`` and keys ``[BK, BD]``.

    ``p_bias [BQ, 1]`` and ``p_hidden`` point to the biases and the mask's addend of the first of these keys. ``left``
    keys exist; if the block is larger (CUT), scores past them are minus infinity.
    """
    m_row = row_part(o_k, left)
    if HAS_MASK:
        # [BK]
        b_hidden = tl.load(p_hidden + o_k, mask=m_row, other=0.0) if CUT else tl.load(p_hidden + o_k)
    if HAS_BIAS:
        # [BQ, BK]
        m_bias = m_q[:, None] & m_row[None, :] if CUT else m_q[:, None]
        b_bias = tl.load(p_bias + o_k[None, :], mask=m_bias, other=0.0)
        if HAS_MASK:
            b_bias = plus(b_bias, b_hidden[None, :])
        b_s = dot_plus(b_q, tl.trans(b_k), b_bias.to(tl.float32), PRECISION)
    else:
        b_s = dot(b_q, tl.trans(b_k), PRECISION)
        if HAS_MASK:
            b_s += b_hidden.to(tl.float32)[None, :]
    if CUT:
        b_s = tl.where((o_k < left)[None, :], b_s, -float("inf"))
    return b_s


@triton.jit
def attend_block(
    b_max, b_sum, b_out, b_q, p_k, p_v, p_bias, p_hidden, k_step, v_step, o_k, o_d, m_q, m_d, left,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running maximum, sum and output by a block of keys; ``left`` exist if CUT."""
    m_k = o_k < left
    m_kd = m_k[:, None] & m_d[None, :] if CUT else m_d[None, :]
    # [BK, BD]
    b_k = tl.load(p_k + o_k[:, None] * k_step + o_d[None, :], mask=m_kd, other=0.0)
    b_s = scores(b_q, b_k, p_bias, p_hidden, o_k, m_q, left, HAS_BIAS, HAS_MASK, CUT, PRECISION)
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_p = tl.exp2(b_s * LOG2E - (b_new * LOG2E)[:, None])
    b_old = tl.exp2((b_max - b_new) * LOG2E)
    # [BK, BD]
    b_v = tl.load(p_v + o_k[:, None] * v_step + o_d[None, :], mask=m_kd, other=0.0)
    b_out = dot(cast(b_p, b_v.dtype), b_v, PRECISION, b_out * b_old[:, None])
    return b_new, b_sum * b_old + tl.sum(b_p, 1), b_out


@triton.jit
def attend_keys(
    b_q, p_k, p_v, p_bias, p_hidden, k_step, v_step, keys, o_k, o_d, m_q, m_d,
    BQ: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from scaled queries ``[BQ, BD]`` to all keys; pointers are those of the first key.

    Returns:
        Maxima and sums of exponentials ``[BQ]``, and values ``[BQ, BD]`` to divide by the sums, in float32.
    """
    step = tl.full([], BK, tl.int64)
    b_max = tl.full([BQ], LOWEST, tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    b_out = tl.zeros([BQ, BD], tl.float32)
    if keys % BK:
        whole = (keys - keys % BK).to(tl.int64)
        b_max, b_sum, b_out = attend_block(
            b_max, b_sum, b_out, b_q, p_k + whole * k_step, p_v + whole * v_step,
            further(p_bias, whole, HAS_BIAS), further(p_hidden, whole, HAS_MASK), k_step, v_step, o_k, o_d, m_q, m_d,
            keys % BK, HAS_BIAS, HAS_MASK, True, PRECISION,
        )  # fmt: skip
    for _ in range(0, keys // BK):
        b_max, b_sum, b_out = attend_block(
            b_max, b_sum, b_out, b_q, p_k, p_v, p_bias, p_hidden, k_step, v_step, o_k, o_d, m_q, m_d, BK,
            HAS_BIAS, HAS_MASK, False, PRECISION,
        )  # fmt: skip
        p_k += step * k_step
        p_v += step * v_step
        if HAS_BIAS:
            p_bias += BK
        if HAS_MASK:
            p_hidden += BK
    return b_max, b_sum, b_out


@triton.jit
def mean_of_values(
    b_sum, b_out, p_v, v_step, keys, o_k, o_d, m_d, BQ: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Return what :func:`attend_keys` returns where all keys are masked: the mean of all values."""
    step = tl.full([], BK, tl.int64)
    for i_k in range(0, keys, BK):
        m_kd = (o_k < keys - i_k)[:, None] & m_d[None, :]
        b_v = tl.load(p_v + o_k[:, None] * v_step + o_d[None, :], mask=m_kd, other=0.0)
        b_out += tl.sum(b_v.to(tl.float32), 0)[None, :]
        p_v += step * v_step
    # The maximum makes the sum of exponentials infinite, which tells the backward pass.
    return tl.full([BQ], float("inf"), tl.float32), b_sum + keys, b_out


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    x, out, lse, scale, heads, rows, queries, keys, x_strides, out_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention: a program owns queries of one row and head, and walks over the keys."""
    i_q, i_r, i_h, i_b = program_row(tl.cdiv(queries, BQ), rows, heads)
    o_q, o_d, m_q, m_d, m_qd = own_block(i_q, queries, D, BQ, BD)
    o_k = tl.arange(0, BK).to(tl.int64)

    # [BQ, BD]
    p_q = head_block(x.q, x_strides.q, i_b, i_r, i_h, o_q, o_d)
    b_q = scaled(tl.load(p_q, mask=m_qd, other=0.0), scale)
    p_k = head_of(x.k, x_strides.k, i_b, i_r, i_h)
    p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_q[:, None] * x_strides.bias[2], HAS_BIAS)
    p_hidden = hidden_of(x.hidden, x_strides.hidden, i_b, i_r, HAS_MASK)

    v_step = x_strides.v[2]
    b_max, b_sum, b_out = attend_keys(
        b_q, p_k, p_v, p_bias, p_hidden, x_strides.k[2], v_step, keys, o_k, o_d, m_q, m_d,
        BQ, BD, BK, HAS_BIAS, HAS_MASK, PRECISION,
    )  # fmt: skip
    if HAS_MASK:  # noqa: SIM102, this condition is decided at compile time
        if tl.max(b_max, 0) == LOWEST:
            p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
            b_max, b_sum, b_out = mean_of_values(b_sum, b_out, p_v, v_step, keys, o_k, o_d, m_d, BQ, BK)
    b_out = b_out / b_sum[:, None]
    i_bh = i_b * heads + i_h
    tl.store(lse + (i_bh * rows + i_r) * queries + o_q, b_max * LOG2E + tl.log2(b_sum), mask=m_q)
    if HAS_GATE:
        p_gate = head_block(x.gate, x_strides.gate, i_b, i_r, i_h, o_q, o_d)
        b_out *= tl.sigmoid(tl.load(p_gate, mask=m_qd, other=0.0).to(tl.float32))
    p_out = head_block(out, out_strides, i_b, i_r, i_h, o_q, o_d)
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_qd)


class TritonOperands(NamedTuple):
    """Operands of the kernels with at most one leading axis, or their strides; any strides, channels innermost."""

    q: Any
    k: Any
    v: Any
    bias: Any  #: As :func:`aligned` lays it out
    hidden: Any  #: Result of :func:`hidden_keys`
    gate: Any

    @property
    def strides(self) -> TritonOperands:
        """Strides of each operand without the channels', which is 1; zeros for a missing operand."""
        q, k, v, bias, hidden, gate = self
        own = strides(q, 4), strides(k, 4), strides(v, 4)
        return TritonOperands(*own, strides(bias, 3), strides(hidden, 2), strides(gate, 4))

    @property
    def pointers(self) -> TritonOperands:
        """Operands with the queries in place of missing ones: a function of Triton 3.6 cannot return None."""
        return TritonOperands(*(self.q if x is None else x for x in self))


def aligned(bias: Tensor) -> Tensor:
    """Lay out ``bias [*, Nq, Nk]`` with adjacent keys and room for a multiple of 16; copy it if necessary."""
    # All rows of an attention read it, in pieces of 16 bytes, and one compiled kernel serves all lengths.
    keys = bias.shape[-1]
    room = -(-keys // 16) * 16
    if bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0 and (keys == room or _has_room(bias, room)):
        return bias
    return bias.new_empty(*bias.shape[:-1], room)[..., :keys].copy_(bias)


def _has_room(bias: Tensor, room: int) -> bool:
    """Return True if rows begin at multiples of 16 and their padding is within the memory."""
    last = sum((size - 1) * step for size, step in zip(bias.shape[:-1], bias.stride()[:-1], strict=True))
    here = bias.storage_offset()
    held = bias.untyped_storage().nbytes() // bias.element_size()
    steps = (here, *bias.stride()[:-1])
    return bias.numel() > 0 and all(step % 16 == 0 for step in steps) and here + last + room <= held


def hidden_keys(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return addends of scores, laid out as by :func:`aligned`: 0 for keys to use, minus infinity for others."""
    keys = mask.shape[-1]
    added = mask.new_zeros(*mask.shape[:-1], -(-keys // 16) * 16, dtype=dtype)
    if keys % 16:
        added = added[..., :keys]
    return added.masked_fill_(mask == 0, -float("inf"))


def triton_operands(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None
) -> TritonOperands:
    """Convert arguments of the public function to operands of the kernels."""
    q, k, v = (batched(innermost(x)) for x in (q, k, v))
    return TritonOperands(
        *(q, k, v),
        None if bias is None else aligned(batched(bias, 3)),
        None if mask is None else hidden_keys(batched(mask, 2), (q if bias is None else bias).dtype),
        None if gate is None else batched(innermost(gate)),
    )


def config(kernel: str, q: Tensor) -> LaunchConfig:
    """Return the configuration for queries ``[*, R, Nq, H, D]``."""
    key = f"{TRITON_TYPES[q.dtype]}_{padded(q.shape[-1])}"
    short = "_short" if q.shape[-3] <= SHORT else ""
    return launch_config(kernel, key + short + products_suffix(q), q.device)


def attend_triton(out: Tensor, operands: TritonOperands, scale: float) -> Tensor:
    """Fill ``out [*, R, Nq, H, D]``, of any strides, but channels innermost.

    Returns:
        ``lse [*, H, R, Nq]`` in float32, for the backward pass: log2 of the sum of a query's exponentials, infinite if
        all of its keys are masked.
    """
    q = operands.q
    *batch, rows, queries, heads, channels = q.shape
    lse = q.new_empty(*batch, heads, rows, queries, dtype=torch.float32)
    chosen = config("attention_forward", q)
    programs = triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * math.prod(batch)
    if programs == 0 or channels == 0:
        return lse
    launch(attention_forward_kernel, (programs,))(
        *(operands.pointers, out, lse, scale, heads, rows, queries, operands.k.shape[-3]),
        *(operands.strides, strides(out, 4)),
        D=channels,
        BD=padded(channels),
        HAS_BIAS=operands.bias is not None,
        HAS_MASK=operands.hidden is not None,
        HAS_GATE=operands.gate is not None,
        PRECISION=precision(q, chosen),
        **chosen.launch,
    )
    return lse
