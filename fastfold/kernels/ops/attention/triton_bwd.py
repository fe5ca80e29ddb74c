"""Attention in Triton, backward: the gate, and what launches the kernels of the gradients."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import Specimen
from fastfold.kernels.common.layout import padded, strides
from fastfold.kernels.common.triton_math import cast, precision
from fastfold.kernels.ops.attention.aot_variants import attention_specimens
from fastfold.kernels.ops.attention.triton_bwd_kernels import (
    attention_grad_bias_kernel,
    attention_grad_kv_kernel,
    attention_grad_q_kernel,
)
from fastfold.kernels.ops.attention.triton_fwd import SIZES, TritonOperands, config


@triton.jit(do_not_specialize=SIZES)
def attention_ungate_kernel(
    out,
    grad,
    gate,
    grad_out,
    grad_gate,
    delta,
    heads,
    rows,
    queries,
    out_b,
    out_r,
    out_n,
    out_h,
    grad_b,
    grad_r,
    grad_n,
    grad_h,
    gate_b,
    gate_r,
    gate_n,
    gate_h,
    grad_gate_b,
    grad_gate_r,
    grad_gate_n,
    grad_gate_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Gradients before the gate and of the gate, and ``delta``, the weighted mean of what the weights receive."""
    i_p = tl.program_id(0)
    n_q = tl.cdiv(queries, BQ)
    # Heads run fastest: programs that run together read the same memory lines.
    i_h = (i_p % heads).to(tl.int64)
    i_q = i_p // heads % n_q
    i_r = (i_p // heads // n_q % rows).to(tl.int64)
    i_b = (i_p // heads // n_q // rows).to(tl.int64)
    o_d = tl.arange(0, BD)
    o_q = i_q.to(tl.int64) * BQ + tl.arange(0, BQ)
    m_q = o_q < queries
    m = m_q[:, None] & (o_d < D)[None, :]

    # [BQ, BD]
    p_out = out + i_b * out_b + i_r * out_r + i_h * out_h + o_q[:, None] * out_n + o_d[None, :]
    b_out = tl.load(p_out, mask=m, other=0.0).to(tl.float32)
    p_grad = grad + i_b * grad_b + i_r * grad_r + i_h * grad_h + o_q[:, None] * grad_n + o_d[None, :]
    b_grad = tl.load(p_grad, mask=m, other=0.0).to(tl.float32)
    if HAS_GATE:
        p_gate = gate + i_b * gate_b + i_r * gate_r + i_h * gate_h + o_q[:, None] * gate_n + o_d[None, :]
        b_gate = tl.sigmoid(tl.load(p_gate, mask=m, other=0.0).to(tl.float32))
        p_grad_gate = grad_gate + i_b * grad_gate_b + i_r * grad_gate_r + i_h * grad_gate_h
        p_grad_gate += o_q[:, None] * grad_gate_n + o_d[None, :]
        tl.store(p_grad_gate, cast(b_out * b_grad * (1.0 - b_gate), grad_gate.dtype.element_ty), mask=m)
        b_rounded = cast(b_grad * b_gate, grad_out.dtype.element_ty)
        # [B, R, Nq, H, D] without gaps
        p_grad_out = (
            grad_out + (((i_b * rows + i_r) * queries + o_q[:, None]) * heads + i_h) * D + o_d[None, :]
        )
        tl.store(p_grad_out, b_rounded, mask=m)
        # The mean has to be that of the rounded gradients, which the other kernels subtract it from.
        b_out = tl.where(b_gate > 0.0, b_out / b_gate, 0.0)
        b_grad = b_rounded.to(tl.float32)
    p_delta = delta + ((i_b * heads + i_h) * rows + i_r) * queries + o_q
    tl.store(p_delta, tl.sum(b_out * b_grad, 1), mask=m_q)


class Gradients(NamedTuple):
    """Tensors to fill, of the operands' shapes, channels innermost; the gate's is None where there is none."""

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
    """Fill the gradients of :func:`attend_triton`.

    Args:
        grad: Of the output, ``[B, R, Nq, H, D]``, channels innermost.
        operands: What it read.
        out: What it filled.
        lse: What it returned.
        grads: Where the gradients go.
        scale: As there.
        need_bias: Whether the bias has a gradient.

    Returns:
        That of the bias, ``[B, H, Nq, Nk]`` in float32, or None.
    """
    q, k, v, bias, keep, gate = operands
    batch, rows, queries, heads, channels = q.shape
    keys = k.shape[2]
    sizes = {"D": channels, "BD": padded(channels)}
    delta = torch.empty_like(lse)
    chosen = config("attention_ungate", q)
    programs = triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * batch
    if programs == 0 or channels == 0:
        return None if bias is None or not need_bias else torch.zeros_like(bias, dtype=torch.float32)
    grad_out = grad if gate is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(q):
        attention_ungate_kernel[(programs,)](
            *(out, grad, gate, grad_out, grads.gate, delta),
            *(heads, rows, queries),
            *(*strides(out, 4), *strides(grad, 4), *strides(gate, 4), *strides(grads.gate, 4)),
            **sizes,
            HAS_GATE=gate is not None,
            **chosen.launch,
        )
    read = (q, k, v, bias, keep, grad_out, lse, delta)
    numbers = (scale, heads, rows, queries, keys)
    read_strides = (*strides(q, 4), *strides(k, 4), *strides(v, 4), *strides(bias, 4), *strides(keep, 3))
    read_strides += strides(grad_out, 4)
    switches = {"HAS_MASK": keep is not None, "PRECISION": precision(q)}
    chosen = config("attention_grad_q", q)
    with torch.cuda.device_of(q):
        attention_grad_q_kernel[(triton.cdiv(queries, chosen.blocks["BQ"]) * rows * heads * batch,)](
            *(*read, grads.q, *numbers, *read_strides, *strides(grads.q, 4)),
            **sizes,
            **switches,
            HAS_BIAS=bias is not None,
            **chosen.launch,
        )
    chosen = config("attention_grad_kv", q)
    with torch.cuda.device_of(q):
        attention_grad_kv_kernel[(triton.cdiv(keys, chosen.blocks["BK"]) * rows * heads * batch,)](
            *(*read, grads.k, grads.v, *numbers, *read_strides, *strides(grads.k, 4), *strides(grads.v, 4)),
            **sizes,
            **switches,
            HAS_BIAS=bias is not None,
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
    with torch.cuda.device_of(q):
        attention_grad_bias_kernel[(blocks * groups,)](
            *(*read, parts, *numbers, row_step, *read_strides), **sizes, **switches, **chosen.launch
        )
    return parts[0] if groups == 1 else parts.sum(0)


def row_groups(blocks: int, device: torch.device) -> int:
    """Groups of rows whose gradients of a bias are summed apart, so that few blocks fill the whole GPU.

    No more than 8, which is what their memory multiplies by.
    """
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    return max(1, min(8, 4 * processors // blocks))


def specimens() -> list[Specimen]:
    """The backward kernels for every dtype, channels and shipped configuration."""
    return attention_specimens(
        [
            attention_ungate_kernel,
            attention_grad_q_kernel,
            attention_grad_kv_kernel,
            attention_grad_bias_kernel,
        ]
    )
