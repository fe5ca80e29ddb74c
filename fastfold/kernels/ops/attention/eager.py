"""Attention in PyTorch: blocks of rows that stay in the cache, never all scores at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastfold.kernels.common.layout import MASKED_LOGIT
from fastfold.kernels.common.scratch import BLOCK_ELEMENTS, Scratch
from fastfold.kernels.cpu.products import small_products


class Operands(NamedTuple):
    """Inputs of attention: the arguments of :func:`fastfold.kernels.attention`, with the mask inverted.

    Shapes are the same, with or without leading axes. ``masked [*, R, Nk]`` is true for keys to leave out; None if
    there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    masked: Tensor | None
    gate: Tensor | None

    def batch(self, index: tuple[int, ...]) -> Operands:
        """Return the operands of one element of the leading axes."""
        bias, masked, gate = (None if x is None else x[index] for x in self[3:])
        return Operands(self.q[index], self.k[index], self.v[index], bias, masked, gate)


def prepare(
    bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``bias`` and ``masked`` of :class:`Operands`.

    PyTorch's flash kernel needs a bias without gaps that does not require a gradient, even if none is recorded;
    otherwise PyTorch would hold all scores. A bias from a pair tensor has gaps, because its heads are innermost.
    """
    masked = None if mask is None else mask == 0
    return (
        None if bias is None else bias.detach().to(dtype).contiguous(),
        None if masked is None or not masked.any() else masked,
    )


def attend(
    out: Tensor, operands: Operands, scale: float, scratch: Scratch, *, add: Tensor | None = None
) -> None:
    """Fill ``out [R, Nq, H, D]`` of one batch element; ``add [H, D]`` is added after the gate.

    ``scratch`` has the dtype of ``out``.
    """
    q, k, v, bias, masked, gate = operands
    rows, queries, heads, _ = q.shape
    # A block of rows is still in the cache when the gate reads it. Bias and mask together make one tensor of the
    # size of the scores, so with both a block also splits the queries.
    per_row = q.shape[1:].numel() if bias is None or masked is None else heads * queries * k.shape[1]
    per_row = max(1, per_row)  # there may be no rows, and no queries
    step = max(1, BLOCK_ELEMENTS // 4 // per_row)
    query_step = max(1, min(queries, BLOCK_ELEMENTS * queries // per_row))
    for r in range(0, rows, step):
        row = slice(r, r + step)
        # Heads of a row are interleaved: strides of a power of two would fall on the same places of the cache.
        b_k, b_v = (scratch.copy(name, x[row].transpose(1, 2)) for name, x in (("k", k), ("v", v)))
        b_masked = None if masked is None else masked[row, None, None]
        for n in range(0, queries, query_step):
            query = slice(n, n + query_step)
            b_q = scratch.copy("q or gate", q[row, query].transpose(1, 2))
            b_bias = None if bias is None else bias[:, query].expand(len(b_q), -1, -1, -1)
            if b_masked is not None:
                shape = (len(b_q), 1, 1, k.shape[1]) if b_bias is None else b_bias.shape
                b_scores = scratch("bias", *shape)
                b_bias = b_scores.zero_() if b_bias is None else b_scores.copy_(b_bias)
                b_bias.masked_fill_(b_masked, -math.inf)
            with small_products():
                b_out = scaled_dot_product_attention(b_q, b_k, b_v, attn_mask=b_bias, scale=scale)
            if b_masked is not None and (b_empty := b_masked.all(-1, keepdim=True)).any():
                b_out = torch.where(b_empty, b_v.mean(2, keepdim=True), b_out)
            b_out = b_out.transpose(1, 2)
            if gate is None:
                out[row, query] = b_out
            else:
                opened = scratch.copy("q or gate", gate[row, query]).sigmoid_()  # replaces the queries
                if add is None:
                    torch.mul(b_out, opened, out=out[row, query])
                else:
                    torch.addcmul(add, b_out, opened, out=out[row, query])


def row_step(q: Tensor, k: Tensor) -> int:
    """Return the number of rows per block of :func:`attend_backward`.

    The scores of one head, and keys and values, fit the cache.
    """
    _, queries, heads, channels = q.shape
    return max(1, BLOCK_ELEMENTS // 4 // max(1, k.shape[1] * max(queries, heads * channels // 2)))


def attend_backward(
    grad: Tensor,
    operands: Operands,
    grads: Operands,
    scale: float,
    scratch: Scratch,
    out: Tensor | None = None,
) -> None:
    """Compute the gradients of one batch element.

    Args:
        grad: Gradient of the output, ``[R, Nq, H, D]``.
        operands: Operands of :func:`attend`, ``[R, N, H, D]``.
        grads: Tensors to fill, of the operands' shapes; the bias's is added to, and may be None.
        scale: Factor of the scores.
        scratch: Buffers in an exact dtype.
        out: Tensor ``[R, Nq, H, D]`` to fill with the output, which is recomputed anyway.
    """
    q, k, v, bias, masked, gate = operands
    rows, queries, heads, _ = q.shape
    keys = k.shape[1]
    step = row_step(q, k)
    query_step = min(queries, max(1, BLOCK_ELEMENTS // 4 // keys))
    ones = scratch("ones", 1, step).fill_(1)
    for r in range(0, rows, step):
        row = slice(r, r + step)
        b_k, b_v = scratch.copy("k", _by_head(k[row])), scratch.copy("v", _by_head(v[row]))  # [H, r, Nk, D]
        b_grad_k, b_grad_v = scratch("grad_k", *b_k.shape).zero_(), scratch("grad_v", *b_v.shape).zero_()
        b_masked = None if masked is None else masked[row, None]
        for n in range(0, queries, query_step):
            query = slice(n, n + query_step)
            b_q = scratch.copy("q", _by_head(q[row, query])).mul_(scale)  # [H, r, n, D]
            b_grad_q, b_out = scratch("grad_q", *b_q.shape), scratch("out", *b_q.shape[:3], v.shape[-1])
            b_grad = scratch.copy("grad", _by_head(grad[row, query]))
            if gate is not None:
                b_gate = scratch.copy("gate", _by_head(gate[row, query])).sigmoid_()
                b_grad.mul_(b_gate)  # of the output before the gate
            b_weights = scratch("weights", *b_q.shape[1:3], keys)  # [r, n, Nk]
            b_grad_scores = scratch("grad_scores", *b_weights.shape)
            h_product, h_mean = scratch("product", *b_out.shape[1:]), scratch("mean", *b_out.shape[1:3], 1)
            for h in range(heads):
                if bias is None:
                    torch.bmm(b_q[h], b_k[h].mT, out=b_weights)
                else:
                    h_bias = bias[h, query].to(b_q.dtype).expand_as(b_weights)
                    torch.baddbmm(h_bias, b_q[h], b_k[h].mT, out=b_weights)
                if b_masked is not None:
                    b_weights.masked_fill_(b_masked, MASKED_LOGIT)
                torch.softmax(b_weights, -1, out=b_weights)
                torch.bmm(b_weights, b_v[h], out=b_out[h])
                b_grad_v[h].baddbmm_(b_weights.mT, b_grad[h])
                # Gradient of a score: weight times (gradient of the weight - weighted mean of these gradients).
                torch.sum(torch.mul(b_out[h], b_grad[h], out=h_product), -1, keepdim=True, out=h_mean).neg_()
                torch.baddbmm(h_mean.expand_as(b_weights), b_grad[h], b_v[h].mT, out=b_grad_scores)
                b_grad_scores.mul_(b_weights)
                if b_masked is not None:
                    # Masked keys have weight 0, so this changes only rows whose keys are all masked.
                    b_grad_scores.masked_fill_(b_masked, 0)
                b_grad_q[h].baddbmm_(b_grad_scores, b_k[h], beta=0, alpha=scale)
                b_grad_k[h].baddbmm_(b_grad_scores.mT, b_q[h])
                if grads.bias is not None:
                    # A matrix product is the fastest way to sum over rows.
                    h_grad_bias = grads.bias[h, query].view(1, -1)
                    h_grad_bias.addmm_(ones[:, : len(b_weights)], b_grad_scores.flatten(1))
            grads.q[row, query] = _by_row(b_grad_q)
            if grads.gate is not None:
                b_grad_gate = b_grad.mul_(b_out)
                b_out.mul_(b_gate)
                torch.mul(_by_row(b_grad_gate), _by_row(b_gate.neg_().add_(1)), out=grads.gate[row, query])
            if out is not None:
                out[row, query] = _by_row(b_out)
        grads.k[row], grads.v[row] = _by_row(b_grad_k), _by_row(b_grad_v)


def _by_head(x: Tensor) -> Tensor:
    """View ``[r, n, H, D]`` as ``[H, r, n, D]``; in a copy, a head is a batch of matrices without gaps."""
    return x.permute(2, 0, 1, 3)


def _by_row(x: Tensor) -> Tensor:
    """View ``[H, r, n, D]`` as ``[r, n, H, D]``."""
    return x.permute(1, 2, 0, 3)
