"""Attention in Triton, backward: gradient of the gate, and launches of the gradient kernels."""

# Arguments of kernels are untyped.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import KernelVariant
from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.layout import padded, strides
from fastfold.kernels.common.triton_math import cast, precision
from fastfold.kernels.ops.attention.triton_bwd_kernels import (
    attention_grad_bias_kernel,
    attention_grad_kv_kernel,
    attention_grad_q_kernel,
)
from fastfold.kernels.ops.attention.triton_fwd import (
    SIZES,
    TritonOperands,
    attention_variants,
    config,
    head_block,
    own_block,
)


@triton.jit(do_not_specialize=SIZES)
def attention_ungate_kernel(
    out, grad, gate, grad_out, grad_gate, delta, heads, rows, queries,
    out_strides, grad_strides, gate_strides, grad_gate_strides,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Compute gradients before the gate and of the gate, and ``delta``.

    ``delta`` is the weighted mean of the weights' gradients.
    """
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


class BackwardOperands(NamedTuple):
    """Operands of the gradient kernels, or their strides: forward operands and values of the backward pass.

    The first five are those of :class:`TritonOperands`. ``grad [B, R, Nq, H, D]`` is the gradient of the output before
    the gate. ``lse`` and ``delta``, the weighted mean of the weights' gradients, are ``[B, H, R, Nq]`` in float32,
    without gaps.
    """

    q: Any
    k: Any
    v: Any
    bias: Any
    hidden: Any
    grad: Any
    lse: Any = None
    delta: Any = None


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
    """Return the number of groups of rows whose bias gradients are summed apart, to fill the GPU.

    At most 8, because memory grows with the number.
    """
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    return max(1, min(8, 4 * processors // blocks))


def variants() -> list[KernelVariant]:
    """Record the backward kernels for every dtype, channels and shipped configuration."""

    def launch(x: TritonOperands) -> None:
        lse = x.q.new_empty(1, 4, 2, x.q.shape[2], dtype=torch.float32)
        attend_backward_triton(x.q, x, x.q, lse, Gradients(x.q, x.k, x.v, x.gate), 1.0, need_bias=True)

    return attention_variants(launch)
