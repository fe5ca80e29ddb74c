"""Softmax of attention scores in memory, with pair bias and key mask added in the same pass.

Attention itself never stores its scores (:func:`fastfold.kernels.attention`); this is for callers that need them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastfold.kernels.common.backend import rows_backend
from fastfold.kernels.common.cost import Arguments
from fastfold.kernels.common.layout import MASKED_LOGIT, batched
from fastfold.kernels.common.operator import Backward, define_operator
from fastfold.kernels.common.scratch import Scratch, accumulation_dtype, without_autocast


def softmax_definition(scores: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Compute :func:`softmax` by its specification."""
    exact = accumulation_dtype(scores)
    logits = scores.to(exact)
    if bias is not None:
        logits = logits + bias.to(exact).unsqueeze(-4)
    if mask is not None:
        logits = logits.masked_fill(mask[..., None, None, :] == 0, MASKED_LOGIT)
    return logits.softmax(-1).to(scores.dtype)


@without_autocast
def _weights(scores: Tensor, bias: Tensor | None, mask: Tensor | None, backend: str) -> Tensor:
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    bias = None if bias is None else batched(bias, 3)
    mask = None if mask is None else batched(mask, 2)
    operands = batched(out, 4), batched(scores, 4), bias, mask
    if backend == "triton":
        from fastfold.kernels.ops.softmax.triton_fwd import softmax_forward

        softmax_forward(*operands)
    else:
        _forward(*operands)
    return out


def _forward(out: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor | None) -> None:
    """Compute PyTorch's path, one row ``[H, Nq, Nk]`` at a time, in an exact dtype."""
    scratch = Scratch().of(scores, accumulation_dtype(scores))
    for i in range(scores.shape[0]):
        for r in range(scores.shape[1]):
            b_logits = scratch.copy("logits", scores[i, r])
            if bias is not None:
                b_logits += bias[i]
            if mask is not None:
                b_logits.masked_fill_(mask[i, r] == 0, MASKED_LOGIT)
            out[i, r] = torch.softmax(b_logits, -1, out=b_logits)


def _fake(scores: Tensor, bias: Tensor | None, mask: Tensor | None, backend: str) -> Tensor:
    return scores.new_empty(scores.shape)


@without_autocast
def _compute_gradients(
    grad: Tensor, out: Tensor, mask: Tensor | None, needs: Sequence[bool], backend: str
) -> list[Tensor]:
    """Return gradients of scores and bias, the bias's in an exact dtype; empty tensors for those not needed."""
    need_scores, need_bias = needs
    shape = (*out.shape[:-4], *out.shape[-3:])
    grad_scores = torch.empty(out.shape, dtype=out.dtype, device=out.device) if need_scores else None
    flat_scores = None if grad_scores is None else batched(grad_scores, 4)
    mask = None if mask is None else batched(mask, 2)
    operands = batched(grad, 4), batched(out, 4), mask, flat_scores
    if backend == "triton":
        from fastfold.kernels.ops.softmax.triton_bwd import softmax_backward

        grad_bias = softmax_backward(*operands, need_bias)
    else:
        flat = operands[1].shape[:1] + operands[1].shape[2:]
        grad_bias = out.new_zeros(flat, dtype=accumulation_dtype(out)) if need_bias else None
        _backward_in_rows(*operands, grad_bias)
    grads = (grad_scores, None if grad_bias is None else grad_bias.view(shape))
    return [out.new_empty(0) if g is None else g for g in grads]


def _backward_in_rows(
    grad: Tensor, out: Tensor, mask: Tensor | None, grad_scores: Tensor | None, grad_bias: Tensor | None
) -> None:
    """Compute PyTorch's path of the backward pass; add to ``grad_bias``."""
    scratch = Scratch().of(out, accumulation_dtype(out))
    for i in range(out.shape[0]):
        for r in range(out.shape[1]):
            b_out = scratch.copy("out", out[i, r])
            b_grad = scratch.copy("grad", grad[i, r])
            b_product = scratch("product", *b_out.shape)
            # Rounded weights don't add up to 1; a second mean removes the remainder of the first.
            for _ in range(2):
                b_grad -= torch.sum(torch.mul(b_out, b_grad, out=b_product), -1, True)
            b_grad *= b_out
            if mask is not None:
                # Masked keys have weight 0, so this changes only rows whose keys are all masked.
                b_grad.masked_fill_(mask[i, r] == 0, 0.0)
            if grad_scores is not None:
                grad_scores[i, r] = b_grad
            if grad_bias is not None:
                grad_bias[i] += b_grad


def _backward_fake(call: Arguments) -> list[Tensor]:
    out, (need_scores, need_bias) = call["out"], call["needs"]
    shape, exact = (*out.shape[:-4], *out.shape[-3:]), accumulation_dtype(out)
    return [
        out.new_empty(out.shape) if need_scores else out.new_empty(0),
        out.new_empty(shape, dtype=exact) if need_bias else out.new_empty(0),
    ]


_softmax = define_operator(
    "softmax", _weights, Backward(_compute_gradients, ("scores", "bias"), fake=_backward_fake), fake=_fake
)


def softmax(
    scores: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Compute weights of attention, ``softmax(scores + bias)``, over keys that are not masked.

    Args:
        scores: ``[*, R, H, Nq, Nk]``, any strides.
        bias: ``[*, H, Nq, Nk]`` for all rows R, or None.
        mask: ``[*, R, Nk]``, 0 for keys to leave out, or None. Gets no gradient. If all keys of a row are masked, all
            have the weight 1 / Nk, and the scores get no gradient.
        backend: As in :func:`fastfold.kernels.common.backend.choose_backend`; more than 4,096 keys always use PyTorch.

    Returns:
        ``[*, R, H, Nq, Nk]``, contiguous, in the dtype of ``scores``; computed in float32 (float64 for float64).

    Raises:
        ConfigError: The backend does not exist or cannot run here.

    Example:
        >>> import torch
        >>> from fastfold.kernels import softmax
        >>> scores, bias = torch.randn(2, 4, 5, 5), torch.randn(4, 5, 5)  # 2 rows, 4 heads
        >>> torch.allclose(softmax(scores, bias), torch.softmax(scores + bias, dim=-1), atol=1e-6)
        True
        >>> softmax(torch.zeros(1, 1, 1, 4), mask=torch.tensor([[1, 1, 0, 0]])).tolist()
        [[[[0.5, 0.5, 0.0, 0.0]]]]
    """
    return _softmax(scores, bias, mask, rows_backend(scores, backend))
