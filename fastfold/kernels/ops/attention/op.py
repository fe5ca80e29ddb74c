"""Attention along one axis of a row-major grid, with pair bias, key mask and output gate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost
from fastfold.kernels.common.layout import MASKED_LOGIT, MAX_HEAD_CHANNELS, batched, innermost
from fastfold.kernels.common.operator import BackwardPass, define_operator
from fastfold.kernels.common.scratch import Scratch, accumulation_dtype
from fastfold.kernels.common.shapes import axes_of, check_shapes
from fastfold.kernels.cpu.linear import gradient_dtype
from fastfold.kernels.ops.attention.eager import Operands, attend, attend_backward, prepare


def attention_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute :func:`attention` by its specification, with all scores in memory."""
    exact = accumulation_dtype(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.einsum("...qhd,...khd->...hqk", q.to(exact) * scale, k.to(exact))
    if bias is not None:
        logits = logits + bias.to(exact).unsqueeze(-4)
    if mask is not None:
        logits = logits.masked_fill(mask[..., None, None, :] == 0, MASKED_LOGIT)
    out = torch.einsum("...hqk,...khd->...qhd", logits.softmax(-1), v.to(exact))
    if gate is not None:
        out = out * gate.to(exact).sigmoid()
    return out.to(q.dtype)


def _forward(
    qkv: Sequence[Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    *,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Compute the output ``[*, R, Nq, H, D]``, and sums of exponentials for Triton; PyTorch has an empty tensor."""
    q, k, v = qkv
    if _is_empty(q, k):
        return q.new_zeros(q.shape), _empty_lse(q, backend).zero_()
    out = q.new_empty(q.shape)
    if backend == "triton":
        from fastfold.kernels.ops.attention.triton_fwd import attend_triton, triton_operands

        return out, attend_triton(batched(out), triton_operands(q, k, v, bias, mask, gate), scale)
    operands = Operands(q, k, v, *prepare(bias, mask, q.dtype), gate)
    scratch = Scratch().of(q)
    for i in itertools.product(*map(range, q.shape[:-4])):
        attend(out[i], operands.batch(i), scale, scratch)
    return out, _empty(q)


def _fake(
    qkv: Sequence[Tensor], *others: Tensor | None, backend: str, **options: Any
) -> tuple[Tensor, Tensor]:
    q = qkv[0]
    return q.new_empty(q.shape), _empty_lse(q, backend)


def _empty_lse(q: Tensor, backend: str) -> Tensor:
    """Return room for the sums of exponentials of the Triton backend; an empty tensor for PyTorch."""
    if backend != "triton":
        return _empty(q)
    *lead, rows, queries, heads, _ = q.shape
    return q.new_empty(math.prod(lead), heads, rows, queries, dtype=torch.float32)


def _is_empty(q: Tensor, k: Tensor) -> bool:
    """Return True if there are no queries or no keys; without keys the output is zero."""
    return q.numel() == 0 or k.numel() == 0


def _compute_gradients(
    grad: Tensor,
    qkv: Sequence[Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    out: Sequence[Tensor],
    needs: Sequence[bool],
    *,
    scale: float,
    backend: str,
) -> list[Tensor]:
    """Return gradients of q, k, v, bias and gate without gaps; missing ones and an unneeded bias's are empty.

    ``out`` is the result for Triton, and empty for PyTorch.
    """
    (q, k, v), need_bias = qkv, needs[3]
    if _is_empty(q, k):
        wanted = (q, k, v, bias if need_bias else None, gate)
        return [_empty(q) if x is None else x.new_zeros(x.shape) for x in wanted]
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    grad_gate = None if gate is None else gate.new_empty(gate.shape)
    grad_bias = None
    if backend == "triton":
        from fastfold.kernels.ops.attention.triton_bwd import Gradients, attend_backward_triton
        from fastfold.kernels.ops.attention.triton_fwd import triton_operands

        gate_target = None if grad_gate is None else batched(grad_gate)
        targets = Gradients(batched(grad_q), batched(grad_k), batched(grad_v), gate_target)
        operands = triton_operands(q, k, v, bias, mask, gate)
        grad = batched(innermost(grad))
        grad_bias = attend_backward_triton(grad, operands, batched(out[0]), out[1], targets, scale, need_bias)
    else:
        whole = Operands(q, k, v, bias, None if mask is None else mask == 0, gate)
        scratch = Scratch().of(q, gradient_dtype(q))
        if bias is not None and need_bias:
            grad_bias = bias.new_zeros(bias.shape, dtype=accumulation_dtype(q))
        grads = Operands(grad_q, grad_k, grad_v, grad_bias, None, grad_gate)
        for i in itertools.product(*map(range, q.shape[:-4])):
            attend_backward(grad[i], whole.batch(i), grads.batch(i), scale, scratch)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.view(bias.shape).to(bias.dtype)
    return [_empty(q) if x is None else x for x in (grad_q, grad_k, grad_v, grad_bias, grad_gate)]


def _backward_fake(call: Arguments) -> list[Tensor]:
    qkv = call["qkv"]
    wanted = (*qkv, call["bias"] if call["needs"][3] else None, call["gate"])
    return [_empty(qkv[0]) if x is None else x.new_empty(x.shape) for x in wanted]


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _cost(call: Arguments) -> OperatorCost:
    q, k, _ = call["qkv"]  # [*, R, Nq, H, D], [*, R, Nk, H, D]
    products = q.numel() * k.shape[-3]
    return OperatorCost(4.0 * products, exponentials=products / q.shape[-1])


def _backward_cost(call: Arguments) -> OperatorCost:
    # Five products where the forward pass has two: the scores are computed again.
    forward = _cost(call)
    return OperatorCost(2.5 * forward.flops, launches=3, exponentials=forward.exponentials)


def _saved_result(result: tuple[Tensor, Tensor], call: Arguments) -> tuple[Tensor, ...]:
    """Save the output and sums of exponentials for Triton; PyTorch recomputes them."""
    return result if call["backend"] == "triton" else ()


_attention = define_operator(
    "attention",
    _forward,
    BackwardPass(
        _compute_gradients,
        ("qkv", "bias", "gate"),
        fake=_backward_fake,
        cost=_backward_cost,
        saved_result=_saved_result,
    ),
    fake=_fake,
    cost=_cost,
)


def _check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None
) -> None:
    """Check shapes and dtypes, because kernels would read outside of the tensors."""
    *lead, rows, queries, heads, channels = axes_of("attention", "q", q.shape, "R, Nq, H, D", q.dtype)
    keys = axes_of("attention", "k", k.shape, "R, Nk, H, D")[-3]
    wanted = (
        ("k", k.shape, (*lead, rows, keys, heads, channels)),
        ("v", v.shape, (*lead, rows, keys, heads, channels)),
        ("bias", None if bias is None else bias.shape, (*lead, heads, queries, keys)),
        ("mask", None if mask is None else mask.shape, (*lead, rows, keys)),
        ("gate", None if gate is None else gate.shape, q.shape),
    )
    check_shapes("attention", "q", q.shape, wanted)
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"attention: expected one dtype, found q {q.dtype}, k {k.dtype} and v {v.dtype}")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute multi-head attention in every row: ``softmax(q kᵀ · scale + bias) v · sigmoid(gate)``.

    This is the attention of AlphaFold's MSA rows and columns (supplementary algorithms 7 and 8), of its triangles
    (13 and 14) and, with one query per row, of its global column attention (19), without the projections.

    Strides are free: transposed views are read in place. The Triton backend copies q, k, v and gate if their channels
    are not innermost, and a bias if its keys are not innermost or their number is not a multiple of 16.

    Args:
        q: Queries ``[*, R, Nq, H, D]``; R rows, H heads of D channels.
        k: Keys ``[*, R, Nk, H, D]``.
        v: Values ``[*, R, Nk, H, D]``.
        bias: Added to the scaled scores, the same in every row: ``[*, H, Nq, Nk]``. Every query needs a key with a bias
            above about -1e9: below it float32 loses the scores, so all keys get the same weight. If all biases of a
            query are below -1e30, output and gradients are NaN. Use the mask to leave out keys.
        mask: Keys to use (not 0) and to leave out (0): ``[*, R, Nk]``. A masked key gets weight exactly 0. If all keys
            of a row are masked, each gets weight 1/Nk, whatever the scores and the bias. Without keys (Nk = 0) the
            output is zero.
        gate: Logits ``[*, R, Nq, H, D]`` of the gate that multiplies the output.
        scale: Factor of the scores, by default ``D ** -0.5``.
        backend: ``auto``, ``triton`` or ``torch``; see :func:`fastfold.kernels.common.backend.choose_backend`. Heads of
            more than 128 channels always use PyTorch.

    Returns:
        ``[*, R, Nq, H, D]`` in the dtype of ``q``, accumulated in float32 or better. Neither this nor the backward
        pass holds all scores, and gradients are equal in every run.

    Raises:
        InputError: Shapes or dtypes do not match.
        ConfigError: The backend does not exist or cannot run here.

    Example:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from fastfold.kernels import attention
        >>> q, k, v = torch.randn(3, 2, 5, 4, 8)  # 2 rows, 5 positions, 4 heads of 8 channels
        >>> bias = torch.randn(4, 5, 5)
        >>> plain = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)
        >>> torch.allclose(attention(q, k, v, bias), plain.transpose(1, 2), atol=1e-5)
        True
    """
    _check(q, k, v, bias, mask, gate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = choose_backend(q, backend, fits=q.shape[-1] <= MAX_HEAD_CHANNELS)
    return _attention([q, k, v], bias, mask, gate, scale=scale, backend=chosen)[0]
