"""Attention in Triton, forward: one pass over the keys with a running softmax; no score reaches memory."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import KernelVariant, NewTensor, recorded_variants
from fastfold.kernels.common.layout import batched, innermost, padded, strides
from fastfold.kernels.common.triton_math import cast, dot, precision
from fastfold.kernels.common.tuning import TRITON_TYPES, LaunchConfig, launch_config

LOG2E = tl.constexpr(1.4426950408889634)

# Score of a masked key: so low that no other score or bias comes near it, and finite, so that a block of masked
# keys is no special case. Keys past the end get minus infinity.
MASKED = tl.constexpr(-1e30)

SIZES = ["heads", "rows", "queries", "keys"]
"""Sizes that no kernel is specialised on: it is compiled once for all of them."""

SHORT = 16
"""Up to this number of queries per row take the configuration ``short``."""


@triton.jit
def program_row(n_blocks, rows, heads):
    """Block of this program, and in int64 its row, head and batch element.

    Blocks run fastest, then rows: programs that run together share what they walk over, and all rows of a head find
    its bias in the cache.
    """
    i_p = tl.program_id(0)
    i_r = (i_p // n_blocks % rows).to(tl.int64)
    i_h = (i_p // n_blocks // rows % heads).to(tl.int64)
    i_b = (i_p // n_blocks // rows // heads).to(tl.int64)
    return i_p % n_blocks, i_r, i_h, i_b


@triton.jit
def own_block(i_n, size, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """A block of positions, the channels of a head, and which of positions, channels and both there are."""
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < size
    m_d = o_d < D
    return o_n, o_d, m_n, m_d, m_n[:, None] & m_d[None, :]


@triton.jit
def head_of(x, strides, i_b, i_r, i_h):
    """Pointer to a row and head of ``x [B, R, N, H, D]``."""
    return x + i_b * strides[0] + i_r * strides[1] + i_h * strides[3]


@triton.jit
def positions(p_x, strides, o_n, o_d):
    """Pointers ``[BN, BD]`` to positions and channels of a row and head."""
    return p_x + o_n[:, None] * strides[2] + o_d[None, :]


@triton.jit
def head_block(x, strides, i_b, i_r, i_h, o_n, o_d):
    """Pointers ``[BN, BD]`` to positions and channels of ``x [B, R, N, H, D]``."""
    return positions(head_of(x, strides, i_b, i_r, i_h), strides, o_n, o_d)


@triton.jit
def bias_of(bias, strides, i_b, i_h, o_own, HAS_BIAS: tl.constexpr):
    """Pointers to what a program owns of a head of ``bias [B, H, Nq, Nk]``; None without one."""
    if HAS_BIAS:
        return bias + i_b * strides[0] + i_h * strides[1] + o_own
    else:
        return bias


@triton.jit
def scores(b_x, b_y, scale, p_bias, o_bias, m_bias, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """Scores ``[BX, BY]`` in powers of two of ``b_x [BX, BD]`` and ``b_y [BY, BD]``, with their bias."""
    b_s = dot(b_x, tl.trans(b_y), PRECISION) * (scale * LOG2E)
    if HAS_BIAS:
        # [BX, BY]
        b_bias = tl.load(p_bias + o_bias, mask=m_bias, other=0.0)
        b_s += b_bias.to(tl.float32) * LOG2E
    return b_s


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    x, out, lse, scale, heads, rows, queries, keys, x_strides, out_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns a block of queries of one row and head, and walks over the keys."""
    i_q, i_r, i_h, i_b = program_row(tl.cdiv(queries, BQ), rows, heads)
    o_q, o_d, m_q, m_d, m_qd = own_block(i_q, queries, D, BQ, BD)
    o_k = tl.arange(0, BK).to(tl.int64)

    # [BQ, BD]
    p_q = head_block(x.q, x_strides.q, i_b, i_r, i_h, o_q, o_d)
    b_q = tl.load(p_q, mask=m_qd, other=0.0)
    p_k = head_of(x.k, x_strides.k, i_b, i_r, i_h)
    p_v = head_of(x.v, x_strides.v, i_b, i_r, i_h)
    p_bias = bias_of(x.bias, x_strides.bias, i_b, i_h, o_q[:, None] * x_strides.bias[2], HAS_BIAS)
    o_bias = o_k[None, :] * x_strides.bias[3]
    if HAS_MASK:
        p_keep = x.keep + i_b * x_strides.keep[0] + i_r * x_strides.keep[1]

    step = tl.full([], BK, tl.int64)
    b_max = tl.full([BQ], MASKED, tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    b_out = tl.zeros([BQ, BD], tl.float32)
    for i_k in range(0, keys, BK):
        m_k = o_k < keys - i_k
        m_kd = m_k[:, None] & m_d[None, :]
        # [BK, BD]
        b_k = tl.load(positions(p_k, x_strides.k, o_k, o_d), mask=m_kd, other=0.0)
        b_s = scores(b_q, b_k, scale, p_bias, o_bias, m_q[:, None] & m_k[None, :], HAS_BIAS, PRECISION)
        if HAS_MASK:
            # [BK]
            b_keep = tl.load(p_keep + o_k * x_strides.keep[2], mask=m_k, other=0) != 0
            b_s = tl.where(b_keep[None, :], b_s, tl.where(m_k, MASKED, -float("inf"))[None, :])
        else:
            b_s = tl.where(m_k[None, :], b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_old = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        # [BK, BD]
        b_v = tl.load(positions(p_v, x_strides.v, o_k, o_d), mask=m_kd, other=0.0)
        b_out = b_out * b_old[:, None] + dot(cast(b_p, b_v.dtype), b_v, PRECISION)
        b_max = b_new
        p_k += step * x_strides.k[2]
        p_v += step * x_strides.v[2]
        if HAS_BIAS:
            p_bias += step * x_strides.bias[3]
        if HAS_MASK:
            p_keep += step * x_strides.keep[2]

    b_out = b_out / b_sum[:, None]
    b_lse = b_max + tl.log2(b_sum)
    if HAS_MASK:
        # Infinity tells the backward pass that all keys are masked and every weight is 1 / keys.
        b_lse = tl.where(b_max == MASKED, float("inf"), b_lse)
    i_bh = i_b * heads + i_h
    tl.store(lse + (i_bh * rows + i_r) * queries + o_q, b_lse, mask=m_q)
    if HAS_GATE:
        p_gate = head_block(x.gate, x_strides.gate, i_b, i_r, i_h, o_q, o_d)
        b_out *= tl.sigmoid(tl.load(p_gate, mask=m_qd, other=0.0).to(tl.float32))
    p_out = head_block(out, out_strides, i_b, i_r, i_h, o_q, o_d)
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_qd)


class TritonOperands(NamedTuple):
    """What the kernels read, any strides but channels innermost, and one leading axis; or the strides of that.

    Attributes:
        q: ``[B, R, Nq, H, D]``.
        k: ``[B, R, Nk, H, D]``.
        v: ``[B, R, Nk, H, D]``.
        bias: ``[B, H, Nq, Nk]`` or None.
        keep: Bytes ``[B, R, Nk]``, 0 for keys to leave out, or None.
        gate: ``[B, R, Nq, H, D]`` or None.
    """

    q: Any
    k: Any
    v: Any
    bias: Any
    keep: Any
    gate: Any

    @property
    def strides(self) -> TritonOperands:
        """Strides of each but that of the channels, which is 1; zeros for what is missing."""
        q, k, v, bias, keep, gate = self
        own = strides(q, 4), strides(k, 4), strides(v, 4)
        return TritonOperands(*own, strides(bias, 4), strides(keep, 3), strides(gate, 4))


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
    q = operands.q
    batch, rows, queries, heads, channels = q.shape
    lse = q.new_empty(batch, heads, rows, queries, dtype=torch.float32)
    chosen = config("attention_forward", q)
    programs = triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * batch
    if programs == 0 or channels == 0:
        return lse
    with torch.cuda.device_of(q):
        attention_forward_kernel[(programs,)](
            *(operands, out, lse, scale, heads, rows, queries, operands.k.shape[2]),
            *(operands.strides, strides(out, 4)),
            D=channels,
            BD=padded(channels),
            HAS_BIAS=operands.bias is not None,
            HAS_MASK=operands.keep is not None,
            HAS_GATE=operands.gate is not None,
            PRECISION=precision(q),
            **chosen.launch,
        )
    return lse


CHANNELS = (8, 16, 32, 64, 128)
"""Channels of a head that configurations ship for."""


def example_operands(new: NewTensor, channels: int, queries: int) -> TritonOperands:
    """Operands of which only the shapes count, with bias, mask and gate."""
    x, gate = new(1, 2, 32, 4, channels), new(1, 2, queries, 4, channels)
    return TritonOperands(gate, x, x, new(1, 4, queries, 32), new(1, 2, 32, dtype=torch.uint8), gate)


def attention_variants(launch: Callable[[TritonOperands], object]) -> list[KernelVariant]:
    """What a launch with bias, mask and gate ships, for many queries and, where that is configured apart, for few."""

    def of(queries: int, suffix: str) -> list[KernelVariant]:
        return recorded_variants(
            lambda new, channels: launch(example_operands(new, channels, queries)), "D", CHANNELS, suffix
        )

    plain = of(2 * SHORT, "")
    known = {(x.name, str(x.options)) for x in plain}
    short = of(SHORT, "short ")
    return plain + [x for x in short if (x.name.replace("short ", ""), str(x.options)) not in known]


def variants() -> list[KernelVariant]:
    """The forward kernel for every dtype, channels and shipped configuration."""
    return attention_variants(lambda x: attend_triton(torch.empty_like(x.q), x, 1.0))
