"""Attention in PyTorch: blocks of rows that stay in the cache, never all scores at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastfold.kernels.common.layout import MASKED_LOGIT
from fastfold.kernels.common.scratch import BLOCK_ELEMENTS, Scratch


class Operands(NamedTuple):
    """Inputs of :func:`fastfold.kernels.attention` in its shapes, with or without leading axes."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    masked: Tensor | None  #: ``[*, R, Nk]``, true for keys to leave out; None if there are none
    gate: Tensor | None

    def batch(self, index: tuple[int, ...]) -> Operands:
        """Return the operands of one element of the leading axes."""
        bias, masked, gate = (None if x is None else x[index] for x in self[3:])
        return Operands(self.q[index], self.k[index], self.v[index], bias, masked, gate)


def prepare(
    bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``bias`` and ``masked`` of :class:`Operands`."""
    # PyTorch's flash kernel needs a bias without gaps that does not require a gradient, even if none is recorded;
    # otherwise PyTorch would hold all scores. A bias from a pair tensor has gaps, because its heads are innermost.
    if bias is not None and (bias.requires_grad or bias.dtype != dtype or not bias.is_contiguous()):
        bias = bias.detach().to(dtype).contiguous()
    if mask is not None:
        # The lowest number of a mask takes less time than ``all``, and masks seldom have negative ones.
        is_positive = mask.numel() > 0 and mask.amin().item() > 0
        mask = None if is_positive or mask.all() else mask == 0
    return bias, mask


def attend(
    out: Tensor,
    operands: Operands,
    scale: float,
    scratch: Scratch,
    *,
    add: Tensor | None = None,
    by_head: bool = False,
    by_products: bool = False,
    keep_gate: bool = False,
    weights: Tensor | None = None,
) -> None:
    """Fill ``out [R, Nq, H, D]`` of one batch element; ``add [H, D]`` is added after the gate.

    ``scratch`` has the dtype of ``out``. With ``by_head``, queries, keys, values and gate are those of
    :func:`split_by_head`, and with ``by_products`` scores and sums are batched products. The gate may then be
    overwritten unless ``keep_gate`` is set. Products also fill ``weights [R, H, Nq, Nk]``, those of the keys, for
    shapes of :func:`has_few_weights`.
    """
    q, k, v, bias, masked, gate = operands
    rows, queries, heads, channels = out.shape
    if not by_head:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    keys = k.shape[2]
    in_place = by_head or q.dtype == torch.bfloat16
    # A block of rows is still in the cache when the gate reads it. Bias and mask together make one tensor of the
    # size of the scores, so with both a block also splits the queries.
    has_scores = by_products or (bias is not None and masked is not None)
    per_row = heads * queries * (keys if has_scores else channels)
    per_row = max(1, per_row)  # there may be no rows, and no queries
    step = max(1, BLOCK_ELEMENTS // (1 if by_products else 4) // per_row)
    query_step = max(1, min(queries, BLOCK_ELEMENTS * queries // per_row))
    is_whole = step >= rows and query_step >= queries  # every view costs host time
    for r in range(0, rows, step):
        row = slice(r, r + step)
        b_k, b_v = (k, v) if is_whole else (k[row], v[row])
        if not in_place:
            b_k, b_v = scratch.copy("k", b_k), scratch.copy("v", b_v)
        b_masked = None if masked is None else masked[row, None, None]
        for n in range(0, queries, query_step):
            query = slice(n, n + query_step)
            b_q = q if is_whole else q[row, :, query]
            b_q = b_q if in_place else scratch.copy("q or gate", b_q)
            b_bias = bias if bias is None or is_whole else bias[:, query]
            if b_bias is not None:
                b_bias = b_bias.expand(b_q.shape[0], -1, -1, -1)
            if b_masked is not None:
                shape = (len(b_q), 1, 1, keys) if b_bias is None else b_bias.shape
                b_scores = scratch("bias", *shape)
                b_bias = b_scores.zero_() if b_bias is None else b_scores.copy_(b_bias)
                b_bias.masked_fill_(b_masked, -math.inf)
            b_weights = None if weights is None else weights[row]
            if by_products:
                b_out = _multiply(b_q, b_k, b_v, b_bias, scale, scratch, b_weights)
            else:
                b_out = scaled_dot_product_attention(b_q, b_k, b_v, attn_mask=b_bias, scale=scale)
            if b_masked is not None and (b_empty := b_masked.all(-1, keepdim=True)).any():
                b_out = torch.where(b_empty, b_v.mean(2, keepdim=True), b_out)
                if b_weights is not None:
                    b_weights.masked_fill_(b_empty, 1 / keys)
            b_out, b_place = b_out.transpose(1, 2), out if is_whole else out[row, query]
            if gate is None:
                b_place.copy_(b_out)
                continue
            opened = gate if is_whole else gate[row, query]
            if keep_gate or not by_head:
                opened = scratch.copy("q or gate", opened)  # replaces the queries
            opened.sigmoid_()
            if add is None:
                torch.mul(b_out, opened, out=b_place)
            else:
                torch.addcmul(add, b_out, opened, out=b_place)


def has_few_weights(length: int, heads: int, channels: int) -> bool:
    """Return True if the weights of a row's keys are at most as many as elements of its four projections."""
    return length <= 4 * channels and heads * length**2 <= BLOCK_ELEMENTS


def _multiply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    scratch: Scratch,
    weights: Tensor | None,
) -> Tensor:
    """Return attended values ``[R, H, Nq, D]`` by two batched products; the ``bias`` broadcasts against the scores.

    The scores are rounded to the dtype of ``q``, as in AlphaFold's program; their place is ``weights [R, H, Nq, Nk]``
    if given.
    """
    rows, heads, queries, channels = q.shape
    shape = rows * heads, queries, k.shape[2]
    scores = scratch("scores", *shape) if weights is None else weights.view(shape)
    if bias is not None:
        scores.view(rows, heads, queries, -1).copy_(bias)
    # In one operator, so that sums with the bias are rounded once.
    torch.baddbmm(
        *(scores, q.flatten(0, 1), k.flatten(0, 1).mT), beta=0 if bias is None else 1, alpha=scale, out=scores
    )
    torch.softmax(scores, -1, out=scores)
    out = scratch("attended by head", rows * heads, queries, channels)
    return torch.bmm(scores, v.flatten(0, 1), out=out).unflatten(0, (rows, heads))


def split_by_head(projected: Tensor, scratch: Scratch, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split ``projected [r, N, 3 or 4, H, D]`` into queries, keys, values and gate, one head after the other.

    They are views of ``out [3 or 4, r, H, N, D]`` if given, else of a buffer.

    Returns:
        Queries, keys and values ``[r, H, N, D]``, and the gate ``[r, N, H, D]`` if there is one.
    """
    # Heads of a row are interleaved: in float32, strides of a power of two would fall on the same places of the cache.
    # One copy for all, because every operator costs host time.
    by_head = projected.permute(2, 0, 3, 1, 4)
    q, k, v, *gate = (scratch.copy("by head", by_head) if out is None else out.copy_(by_head)).unbind()
    return (q, k, v, gate[0].transpose(1, 2)) if gate else (q, k, v)


def row_step(q: Tensor, k: Tensor, scores: int) -> int:
    """Return the rows per block of :func:`attend_backward` with a number of scores; keys and values fit the cache."""
    _, queries, heads, channels = q.shape
    return max(1, scores // max(1, heads * k.shape[1] * max(queries, channels)))


def attend_backward(
    grad: Tensor,
    operands: Operands,
    grads: Operands,
    scale: float,
    scratch: Scratch,
    out: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Fill ``grads`` with the gradients of one batch element, from that of the output ``[R, Nq, H, D]``.

    The operands ``[R, N, H, D]`` are those of :func:`attend`, and so are ``weights`` if it kept them. The bias's
    gradient is added to, and may be None. The buffers have the dtype of the products. ``out [R, Nq, H, D]`` is filled
    with the output, which is recomputed anyway. Operands whose heads are one after the other in memory are not copied.
    """
    q, k, v, bias, masked, gate = operands
    rows, queries, heads, _ = q.shape
    keys = k.shape[1]
    scores = 2 * BLOCK_ELEMENTS // scratch.dtype.itemsize
    step = row_step(q, k, scores)
    # Several rows share a block with all heads and queries; a single row may take several blocks.
    query_step = min(queries, max(1, BLOCK_ELEMENTS // 4 // keys))
    group = heads if step > 1 else max(1, scores // (query_step * keys))
    for r in range(0, rows, step):
        row = slice(r, r + step)
        b_k = scratch.contiguous("k", k[row].transpose(1, 2))  # [r, H, Nk, D]
        b_v = scratch.contiguous("v", v[row].transpose(1, 2))
        b_grad_k, b_grad_v = scratch("grad_k", *b_k.shape), scratch("grad_v", *b_v.shape)
        b_masked = None if masked is None else masked[row, None, None]
        for n in range(0, queries, query_step):
            query = slice(n, n + query_step)
            earlier = 0 if n == 0 else 1  # factor of the sums over earlier queries
            b_q = scratch.contiguous("q", q[row, query].transpose(1, 2))  # [r, H, n, D]
            b_grad_q, b_out = scratch("grad_q", *b_q.shape), scratch("out", *b_q.shape[:3], v.shape[-1])
            b_grad = grad[row, query].transpose(1, 2)
            if gate is None:
                b_grad_out = scratch.contiguous("grad", b_grad)
            else:
                b_gate = scratch.contiguous("gate", gate[row, query].transpose(1, 2))
                b_gate = torch.sigmoid(b_gate, out=scratch("opened", *b_out.shape))
                b_grad_out = torch.mul(b_grad, b_gate, out=scratch("grad", *b_out.shape))  # before the gate
            for h in range(0, heads, group):
                head = slice(h, h + group)
                h_q, h_k, h_v, h_grad_q, h_grad_k, h_grad_v, h_grad, h_out = (
                    x[:, head].flatten(0, 1)  # [(r h), n or Nk, D]
                    for x in (b_q, b_k, b_v, b_grad_q, b_grad_k, b_grad_v, b_grad_out, b_out)
                )
                shape = len(b_q), len(h_q) // len(b_q), b_q.shape[2], keys  # [r, h, n, Nk]
                if weights is not None:
                    by_head = scratch.contiguous("weights", weights[row, head, query])
                    h_weights = by_head.flatten(0, 1)
                else:
                    by_head = scratch("weights", *shape)
                    h_weights = by_head.flatten(0, 1)
                    torch.baddbmm(h_weights, h_q, h_k.mT, beta=0, alpha=scale, out=h_weights)
                    if bias is not None:
                        by_head.add_(bias[head, query])
                    if b_masked is not None:
                        by_head.masked_fill_(b_masked, MASKED_LOGIT)
                    torch.softmax(h_weights, -1, out=h_weights)
                torch.bmm(h_weights, h_v, out=h_out)
                h_grad_v.baddbmm_(h_weights.mT, h_grad, beta=earlier)
                h_grad_scores = torch.bmm(h_grad, h_v.mT, out=scratch("grad_scores", *h_weights.shape))
                # Weight times (gradient of the weight - weighted mean of these gradients).
                torch.ops.aten._softmax_backward_data.out(
                    h_grad_scores, h_weights, -1, h_weights.dtype, grad_input=h_grad_scores
                )
                b_grad_scores = h_grad_scores.view(shape)
                if b_masked is not None:
                    # Masked keys have weight 0, so this changes only rows whose keys are all masked.
                    b_grad_scores.masked_fill_(b_masked, 0)
                h_grad_q.baddbmm_(h_grad_scores, h_k, beta=0, alpha=scale)
                h_grad_k.baddbmm_(h_grad_scores.mT, h_q, beta=earlier, alpha=scale)
                if grads.bias is not None:
                    _add_rows(grads.bias[head, query], b_grad_scores, scratch)
            grads.q[row, query] = b_grad_q.transpose(1, 2)
            attended = None if out is None else out[row, query].transpose(1, 2)
            if grads.gate is None:
                if attended is not None:
                    attended.copy_(b_out)
                continue
            b_grad_gate = torch.mul(b_grad, b_out, out=b_grad_out)
            if attended is not None:
                torch.mul(b_out, b_gate, out=attended)
            of_gate = grads.gate[row, query].transpose(1, 2)
            torch.ops.aten.sigmoid_backward(b_grad_gate, b_gate, grad_input=of_gate)
        grads.k[row], grads.v[row] = b_grad_k.transpose(1, 2), b_grad_v.transpose(1, 2)


def _add_rows(total: Tensor, x: Tensor, scratch: Scratch) -> None:
    """Add the sum over rows of ``x [r, h, n, Nk]`` to ``total [h, n, Nk]``."""
    if x.dtype != total.dtype:
        total.add_(torch.sum(x, 0, out=scratch("sum of rows", *total.shape)))
        return
    # A matrix product is the fastest way in float32.
    heads, ones = total.flatten(1)[:, None], x.new_ones(1, 1, len(x)).expand(len(total), -1, -1)
    heads.baddbmm_(ones, x.flatten(2).transpose(0, 1))
