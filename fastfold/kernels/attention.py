"""Attention along one axis of a row-major grid, with pair bias, key mask and output gate."""

from __future__ import annotations

import torch
from torch import Tensor

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
    return attention_definition(q, k, v, bias, mask, gate, scale)
