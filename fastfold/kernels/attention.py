"""Attention along one axis of a row-major grid, with pair bias, key mask and output gate."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from fastfold.kernels.blocks import BLOCK_ELEMENTS, exact_dtype, without_autocast

# AlphaFold's stand-in for minus infinity: a row whose keys are all masked becomes the mean of its values.
MASKED_LOGIT = -1e9


def attention_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Specification of :func:`attention`: materialises all scores."""
    exact = torch.promote_types(q.dtype, torch.float32)
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


class _Attention(torch.autograd.Function):
    """Keeps its inputs and its output; the backward pass recomputes the weights of one block of rows at a time."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        gate: Tensor | None,
        scale: float,
    ) -> Tensor:
        masked = None if mask is None else mask == 0
        if masked is not None and not masked.any():
            masked = None
        # The kernel reads a bias whose last axis is contiguous; that of a pair tensor has the heads there.
        bias = None if bias is None else bias.to(q.dtype).contiguous()
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for i in itertools.product(*map(range, q.shape[:-4])):
            _attend(out[i], q[i], k[i], v[i], _at(bias, i), _at(masked, i), _at(gate, i), scale)
        ctx.save_for_backward(q, k, v, bias, masked, gate, out)
        ctx.scale = scale
        return out

    @staticmethod
    @without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, masked, gate, out = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        need_bias, _, need_gate, _ = ctx.needs_input_grad[3:]
        grad_bias = torch.zeros_like(bias, dtype=exact_dtype(q)) if need_bias else None
        grad_gate = torch.empty_like(out) if need_gate else None
        for i in itertools.product(*map(range, q.shape[:-4])):
            _attend_backward(
                grad[i],
                out[i],
                (q[i], k[i], v[i], _at(bias, i), _at(masked, i), _at(gate, i)),
                tuple(x[i] for x in grads),
                _at(grad_bias, i),
                _at(grad_gate, i),
                ctx.scale,
            )
        wanted = (x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=False))
        return *wanted, grad_bias, None, grad_gate, None


def _at(x: Tensor | None, index: tuple[int, ...]) -> Tensor | None:
    return None if x is None else x[index]


def _attend(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    gate: Tensor | None,
    scale: float,
) -> None:
    """Fill ``out [R, Nq, H, D]``; ``masked [R, Nk]`` is true for keys to leave out."""
    rows, queries, heads, _ = q.shape
    keys = k.shape[1]
    # The kernel reads an expanded bias in place, but bias and mask together have to be added up beforehand.
    scores_per_row = heads * queries * keys if masked is not None and bias is not None else q[0].numel()
    row_step = max(1, BLOCK_ELEMENTS // scores_per_row)
    query_step = max(1, min(queries, BLOCK_ELEMENTS * queries // scores_per_row))
    for r, n in itertools.product(range(0, rows, row_step), range(0, queries, query_step)):
        row, query = slice(r, r + row_step), slice(n, n + query_step)
        b_q, b_k, b_v = (x.transpose(1, 2) for x in (q[row, query], k[row], v[row]))  # [r, H, n, D]
        b_bias = None if bias is None else bias[:, query].expand(len(b_q), -1, -1, -1)
        b_masked = None if masked is None else masked[row, None, None]
        if b_masked is not None:
            b_bias = b_q.new_zeros(()) if b_bias is None else b_bias
            b_bias = b_bias.masked_fill(b_masked, -math.inf)
        b_out = scaled_dot_product_attention(b_q, b_k, b_v, attn_mask=b_bias, scale=scale)
        if b_masked is not None:
            empty = b_masked.all(-1, keepdim=True)
            b_out = torch.where(empty, b_v.mean(2, keepdim=True), b_out) if empty.any() else b_out
        b_out = b_out.transpose(1, 2)
        if gate is None:
            out[row, query] = b_out
        else:
            torch.mul(b_out, gate[row, query].sigmoid(), out=out[row, query])


def _attend_backward(
    grad: Tensor,
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    grads: tuple[Tensor, ...],
    grad_bias: Tensor | None,
    grad_gate: Tensor | None,
    scale: float,
) -> None:
    """Fill the gradients of one batch element of :class:`_Attention`, and add to that of the bias."""
    q, k, v, bias, masked, gate = inputs
    exact = exact_dtype(q)
    grad_q, grad_k, grad_v = grads
    rows, queries, heads, _ = q.shape
    keys = k.shape[1]
    row_step = max(1, BLOCK_ELEMENTS // 2 // (queries * keys))
    query_step = max(1, min(queries, BLOCK_ELEMENTS // 2 // keys))
    scores, grad_scores = q.new_empty(2, min(rows, row_step) * query_step * keys, dtype=exact)
    for r in range(0, rows, row_step):
        row = slice(r, r + row_step)
        b_k, b_v = (_by_head(x[row], exact) for x in (k, v))  # [H, r, Nk, D]
        b_grad_k, b_grad_v = torch.zeros_like(b_k), torch.zeros_like(b_v)
        for n in range(0, queries, query_step):
            query = slice(n, n + query_step)
            b_grad = grad[row, query].to(exact)  # [r, n, H, D]
            b_weighted = b_grad * out[row, query]
            # What the softmax gives back to a score: the weight times (its own gradient - their weighted mean).
            b_mean = b_weighted.sum(-1).neg_()  # [r, n, H]
            if gate is not None:
                b_gate = gate[row, query].to(exact).sigmoid()
                b_grad = b_grad * b_gate
                if grad_gate is not None:
                    grad_gate[row, query] = b_weighted.mul_(b_gate.neg_().add_(1))
            b_q, b_grad = (_by_head(x, exact) for x in (q[row, query], b_grad))  # [H, r, n, D]
            b_grad_q = torch.empty_like(b_q)
            shape = (*b_q.shape[1:3], keys)
            b_scores, b_grad_scores = (x[: math.prod(shape)].view(shape) for x in (scores, grad_scores))
            for h in range(heads):
                if bias is None:
                    torch.bmm(b_q[h], b_k[h].mT, out=b_scores).mul_(scale)
                else:
                    h_bias = bias[h, query].to(exact).expand(shape)
                    torch.baddbmm(h_bias, b_q[h], b_k[h].mT, alpha=scale, out=b_scores)
                if masked is not None:
                    b_scores.masked_fill_(masked[row, None], MASKED_LOGIT)
                torch.softmax(b_scores, -1, out=b_scores)
                b_grad_v[h].baddbmm_(b_scores.mT, b_grad[h])
                torch.baddbmm(b_mean[..., h, None].expand(shape), b_grad[h], b_v[h].mT, out=b_grad_scores)
                b_grad_scores.mul_(b_scores)
                if masked is not None:
                    b_grad_scores.masked_fill_(masked[row, None], 0)
                b_grad_q[h].baddbmm_(b_grad_scores, b_k[h], beta=0, alpha=scale)
                b_grad_k[h].baddbmm_(b_grad_scores.mT, b_q[h], alpha=scale)
                if grad_bias is not None:
                    grad_bias[h, query] += b_grad_scores.sum(0)
            grad_q[row, query] = b_grad_q.permute(1, 2, 0, 3)
        grad_k[row], grad_v[row] = (x.permute(1, 2, 0, 3) for x in (b_grad_k, b_grad_v))


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[r, n, H, D]`` to ``[H, r, n, D]`` in memory: matrices without gaps are multiplied faster."""
    return x.permute(2, 0, 1, 3).to(dtype, memory_format=torch.contiguous_format)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Multi-head attention in every row: ``softmax(q kᵀ · scale + bias) v · sigmoid(gate)``.

    The attention of AlphaFold's MSA rows and columns (supplementary algorithms 7 and 8), of its triangles
    (13 and 14) and, with one query per row, of its global column attention (19), without the projections.

    Args:
        q: Queries ``[*, R, Nq, H, D]``; R rows, H heads of D channels.
        k: Keys ``[*, R, Nk, H, D]``.
        v: Values ``[*, R, Nk, H, D]``.
        bias: Added to the scaled scores, the same in every row: ``[*, H, Nq, Nk]``.
        mask: Keys to use (not 0) and to leave out (0): ``[*, R, Nk]``. A masked key gets weight exactly 0; in
            a row whose keys are all masked every key gets weight 1/Nk, whatever the scores and the bias.
        gate: Logits ``[*, R, Nq, H, D]`` of the gate that multiplies the output.
        scale: Factor of the scores, by default ``D ** -0.5``.

    Returns:
        ``[*, R, Nq, H, D]`` in the dtype of ``q``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(q, k, v, bias, mask, gate, scale)
