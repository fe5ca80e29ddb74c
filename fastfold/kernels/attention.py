"""Attention along one axis of a row-major grid, with pair bias, key mask and output gate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from fastfold.kernels.blocks import BLOCK_ELEMENTS, Scratch, exact_dtype, without_autocast

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
        # PyTorch's flash kernel takes a bias without gaps (that of a pair tensor has the heads innermost) that
        # does not require a gradient, even where none is recorded; it holds all scores otherwise.
        bias = None if bias is None else bias.detach().to(q.dtype).contiguous()
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
    # A block of rows leaves the kernel in the cache, for the gate. Bias and mask together make one tensor of the
    # size of the scores, so there a block is also one of queries.
    per_row = q[0].numel() if bias is None or masked is None else heads * queries * k.shape[1]
    step = max(1, BLOCK_ELEMENTS // 4 // per_row)
    query_step = max(1, min(queries, BLOCK_ELEMENTS * queries // per_row))
    scratch = Scratch(q.device, q.dtype)
    for r, n in itertools.product(range(0, rows, step), range(0, queries, query_step)):
        row, query = slice(r, r + step), slice(n, n + query_step)
        b_q, b_k, b_v = (x.transpose(1, 2) for x in (q[row, query], k[row], v[row]))  # [r, H, n, D]
        b_bias = None if bias is None else bias[:, query].expand(len(b_q), -1, -1, -1)
        b_masked = None if masked is None else masked[row, None, None]
        if b_masked is not None:
            shape = (len(b_q), 1, 1, k.shape[1]) if b_bias is None else b_bias.shape
            b_scores = scratch("bias", *shape)
            b_bias = (b_scores.zero_() if b_bias is None else b_scores.copy_(b_bias)).masked_fill_(
                b_masked, -math.inf
            )
        b_out = scaled_dot_product_attention(b_q, b_k, b_v, attn_mask=b_bias, scale=scale)
        if b_masked is not None and (b_empty := b_masked.all(-1, keepdim=True)).any():
            b_out = torch.where(b_empty, b_v.mean(2, keepdim=True), b_out)
        b_out = b_out.transpose(1, 2)
        if gate is None:
            out[row, query] = b_out
        else:
            torch.mul(b_out, scratch.copy("gate", gate[row, query]).sigmoid_(), out=out[row, query])


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of rows and, for each, the slices of its queries, such that a head's scores fit into the cache."""
    rows, queries, heads, channels = q.shape
    keys = k.shape[1]
    step = max(1, BLOCK_ELEMENTS // 2 // (keys * max(queries, heads * channels)))
    query_step = min(queries, max(1, BLOCK_ELEMENTS // 2 // keys))
    query_slices = [slice(n, n + query_step) for n in range(0, queries, query_step)]
    for r in range(0, rows, step):
        yield slice(r, r + step), query_slices


def _by_head(x: Tensor) -> Tensor:
    """View ``[r, n, H, D]`` as ``[H, r, n, D]``: copied so, a head is a batch of matrices without gaps."""
    return x.permute(2, 0, 1, 3)


def _by_row(x: Tensor) -> Tensor:
    """View ``[H, r, n, D]`` as ``[r, n, H, D]``."""
    return x.permute(1, 2, 0, 3)


def _weights(out: Tensor, q: Tensor, k: Tensor, bias: Tensor | None, masked: Tensor | None) -> None:
    """Fill ``out [r, n, Nk]`` with the weights of one head; ``q [r, n, D]`` is scaled, ``masked [r, Nk]``."""
    if bias is None:
        torch.bmm(q, k.mT, out=out)
    else:
        torch.baddbmm(bias.to(out.dtype).expand_as(out), q, k.mT, out=out)
    if masked is not None:
        out.masked_fill_(masked[:, None], MASKED_LOGIT)
    torch.softmax(out, -1, out=out)


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
    grad_q, grad_k, grad_v = grads
    scratch = Scratch(q.device, exact_dtype(q))
    ones = scratch("ones", 1, len(q)).fill_(1)
    for row, queries in _blocks(q, k):
        b_k, b_v = scratch.copy("k", _by_head(k[row])), scratch.copy("v", _by_head(v[row]))  # [H, r, Nk, D]
        b_grad_k, b_grad_v = scratch("grad_k", *b_k.shape).zero_(), scratch("grad_v", *b_v.shape).zero_()
        b_masked = None if masked is None else masked[row]
        for query in queries:
            b_grad = scratch.copy("grad", grad[row, query])  # [r, n, H, D]
            b_weighted = scratch.copy("weighted", out[row, query]).mul_(b_grad)
            # What the softmax gives back to a score: the weight times (its own gradient - their weighted mean).
            b_mean = torch.sum(b_weighted, -1, out=scratch("mean", *b_weighted.shape[:3])).neg_()  # [r, n, H]
            if gate is not None:
                b_gate = scratch.copy("gate", gate[row, query]).sigmoid_()
                b_grad.mul_(b_gate)
                if grad_gate is not None:
                    torch.mul(b_weighted, b_gate.neg_().add_(1), out=grad_gate[row, query])
            b_grad = scratch.copy("grad_by_head", _by_head(b_grad))  # [H, r, n, D]
            b_q = scratch.copy("q", _by_head(q[row, query])).mul_(scale)
            b_grad_q = scratch("grad_q", *b_q.shape)
            b_weights = scratch("weights", *b_q.shape[1:3], k.shape[1])  # [r, n, Nk]
            b_grad_scores = scratch("grad_scores", *b_weights.shape)
            for h in range(len(b_q)):
                _weights(b_weights, b_q[h], b_k[h], None if bias is None else bias[h, query], b_masked)
                b_grad_v[h].baddbmm_(b_weights.mT, b_grad[h])
                h_mean = b_mean[..., h, None].expand_as(b_grad_scores)
                torch.baddbmm(h_mean, b_grad[h], b_v[h].mT, out=b_grad_scores).mul_(b_weights)
                if b_masked is not None:
                    # A weight of 0 has done this already, except in rows whose keys are all masked.
                    b_grad_scores.masked_fill_(b_masked[:, None], 0)
                b_grad_q[h].baddbmm_(b_grad_scores, b_k[h], beta=0, alpha=scale)
                b_grad_k[h].baddbmm_(b_grad_scores.mT, b_q[h])
                if grad_bias is not None:
                    # The sum over rows as a matrix product, which is the fastest of the ways to add up.
                    h_grad_bias = grad_bias[h, query].view(1, -1)
                    h_grad_bias.addmm_(ones[:, : len(b_weights)], b_grad_scores.flatten(1))
            grad_q[row, query] = _by_row(b_grad_q)
        grad_k[row], grad_v[row] = _by_row(b_grad_k), _by_row(b_grad_v)


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
