"""Blocks of rows of gated self-attention: Triton's layer norm, attention and epilogue around PyTorch's products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastfold.kernels.common.layout import GPU_POSITIONS
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.ops.attention.triton_bwd import Gradients, attend_backward_triton
from fastfold.kernels.ops.attention.triton_fwd import TritonOperands, aligned, attend_triton, hidden_keys
from fastfold.kernels.ops.gated_attention import eager, triton_rows
from fastfold.kernels.ops.gated_attention.eager import EPS, RowBlock, Weights, project, projections
from fastfold.kernels.ops.layer_norm.op import layer_norm
from fastfold.kernels.ops.residual_update.op import fill_update
from fastfold.kernels.ops.residual_update.operands import UpdateOperands


def prepare(
    bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Lay out bias and mask as :func:`attend_triton` reads them."""
    hidden = None if mask is None else hidden_keys(mask, dtype if bias is None else bias.dtype)
    return None if bias is None else aligned(bias), hidden


def backward_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the products of the backward pass."""
    return x.dtype


def row_step(x: Tensor) -> int:
    """Return the number of rows per block of ``x [R, N, c]``, in equal blocks of at most ``GPU_POSITIONS``."""
    # Each block costs the host the same launches, a small rest too.
    rows, length, _ = x.shape
    blocks = -(-rows // max(1, GPU_POSITIONS // max(1, length)))
    return -(-rows // max(1, blocks)) or 1


class TritonAttentionForward(eager.AttentionForward):
    """Forward pass of blocks of rows."""

    # After the last product, bias, dropout and residual are one pass: the update is read and the result written once.

    def __init__(self, weights: Weights, heads: int) -> None:
        self._weights, self._heads = weights, heads
        self._projections = projections(weights)

    def begin(self, x: Tensor, scratch: Scratch) -> Tensor:
        """Compute projections ``[r, N, 3 or 4, H, D]`` of a block, which need only ``x [r, N, c]``."""
        return self._project(x, scratch)[-1]

    def _project(self, x: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised block ``[r, N, c]``, its view ``[r N, c]``, and its projections."""
        normed = layer_norm(x, *self._weights.norm, EPS, backend="triton")
        flat = normed.flatten(0, 1)
        channels = self._weights.output.shape[1] // self._heads
        projected = self._projections(flat, "projected", scratch)
        return normed, flat, projected.view(*x.shape[:2], -1, self._heads, channels)

    def __call__(
        self,
        out: Tensor,
        rows: RowBlock,
        scratch: Scratch,
        projected: Tensor | None = None,
        kept: eager.Kept | None = None,
    ) -> None:
        """Fill ``out [r, N, c]``, which may be ``x`` or the residual; ``projected`` is the result of :meth:`begin`.

        Nothing is ``kept``.
        """
        assert kept is None
        weights = self._weights
        x, bias, hidden, residual, dropout = rows
        update = None
        if projected is None and triton_rows.serves(x, weights, self._heads):
            attended = triton_rows.attend_rows(rows, weights, self._heads, scratch)
        else:
            if projected is None:
                # After its projections, the normalised block is free to hold the update.
                update, flat_update, projected = self._project(x, scratch)
            attended, *_ = _attend(projected, bias, hidden, scratch)
        if update is None:
            update = scratch("update", *x.shape)
            flat_update = update.flatten(0, 1)
        torch.mm(attended.view(-1, weights.output.shape[1]), weights.output.t(), out=flat_update)
        fill_update(out, UpdateOperands(update, residual, weights.output_bias, None, dropout), "triton")


def _attend(
    projected: Tensor, bias: Tensor | None, hidden: Tensor | None, scratch: Scratch
) -> tuple[Tensor, Tensor, TritonOperands]:
    """Attend within a projected block: ``[*, r, N, H, D]``, sums of exponentials, and operands.

    The operands may have a leading axis, as gradients need it.
    """
    q, k, v, *gate = projected.unbind(-3)
    operands = TritonOperands(q, k, v, bias, hidden, gate[0] if gate else None)
    attended = scratch("attended", *q.shape)
    lse = attend_triton(attended, operands, q.shape[-1] ** -0.5)
    return attended, lse, operands


def empty_normalized(x: Tensor) -> list[Tensor]:
    """Return uninitialised results of :meth:`TritonAttentionGradients.begin` before the projections."""
    width = x.shape[-1] * (1 if x.dtype == torch.float32 else 2)
    return [x.new_empty(*x.shape[:-1], width, dtype=backward_dtype(x))]


class TritonAttentionGradients(eager.AttentionGradients):
    """Gradients of blocks of rows, the parameters' in float32; arguments as of the PyTorch path."""

    def __init__(self, weights: Weights, heads: int, needs_parameters: bool) -> None:
        self._weights, self._heads, self._needs_parameters = weights, heads, needs_parameters

    def begin(self, x: Tensor, scratch: Scratch) -> list[Tensor]:
        """Compute the values for the gradients of a block that need only ``x [r, N, c]``.

        Returns:
            Normalised ``[r, N, c or 2 c]``, and projections ``[r, N, 3 or 4, H, D]``.
        """
        weights, normed = self._weights, _normalize_exactly(x, self._weights)
        if normed.shape[-1] > x.shape[-1]:
            weights = weights._replace(merged=weights.merged.repeat(1, 2))
        return [normed, project(normed, projections(weights), weights, self._heads, scratch)]

    def __call__(
        self,
        grad: Tensor,
        rows: RowBlock,
        grad_bias: Tensor | None,
        totals: Weights | None,
        scratch: Scratch,
        projections: Sequence[Tensor] = (),
        kept: eager.Kept | None = None,
    ) -> tuple[Tensor, Weights | None]:
        """Compute gradients of a block of rows; without totals, needed ones of the block become the totals."""
        assert kept is None
        weights = self._weights
        x, bias, hidden, _, dropout = rows
        normed, projected = projections or self.begin(x, scratch)
        bias, hidden = (None if t is None else t[None] for t in (bias, hidden))
        attended, lse, read = _attend(projected[None], bias, hidden, scratch)
        grad = (grad if dropout is None else grad * dropout).to(scratch.dtype).flatten(0, 1)
        flat = attended.view(len(grad), -1)
        grad_attended = _product(grad, weights.output)
        grad_projected = scratch("grad_projected", 1, *x.shape[:2], len(weights.merged))
        grads = grad_projected.view(1, *x.shape[:2], -1, *attended.shape[3:]).unbind(3)
        has_gate = len(grads) > 3
        block_bias = attend_backward_triton(
            # The gate multiplies the unrounded gradient.
            (grad_attended if has_gate else grad_attended.to(x.dtype)).view(attended.shape),
            read,
            attended,
            lse,
            Gradients(grads[0], grads[1], grads[2], grads[3] if has_gate else None),
            attended.shape[-1] ** -0.5,
            grad_bias is not None,
        )
        if grad_bias is not None and block_bias is not None:
            grad_bias.add_(block_bias[0])
        grad_projected = grad_projected.flatten(0, 2)
        grad_normed = _product(grad_projected, weights.merged)
        grad_x, *grad_norm = torch.ops.fastfold.layer_norm_backward(
            grad_normed.view(x.shape),
            x,
            weights.norm[0],
            EPS,
            [True, *(self._needs_parameters,) * 2],
            "triton",
        )
        if not self._needs_parameters:
            return grad_x, None
        merged = _product(grad_projected.t(), normed.flatten(0, 1))
        if normed.shape[-1] > x.shape[-1]:
            merged = merged.view(len(merged), 2, -1).sum(1)
        bias = weights.bias
        if bias is not None:
            bias = grad_projected[:, -len(bias) :].sum(0, dtype=torch.float32)
        shares = Weights(
            norm=(grad_norm[0], grad_norm[1]),
            merged=merged,
            bias=bias,
            output=_product(grad.t(), flat),
            output_bias=grad.sum(0, dtype=torch.float32),
        )
        if totals is None:
            return grad_x, shares
        for total, share in zip((*totals.norm, *totals[1:]), (*shares.norm, *shares[1:]), strict=True):
            if isinstance(total, Tensor) and isinstance(share, Tensor):
                total.add_(share)
        return grad_x, totals


def _normalize_exactly(x: Tensor, weights: Weights) -> Tensor:
    """Normalise a block to ``[r, N, c]``; for 16 bits ``[r, N, 2 c]``, rounded values and rounding remainders."""
    # Rounding the normalised input causes the largest error of the backward pass, because queries, keys and values
    # share it; the second half of a longer product corrects it.
    exact = layer_norm(x.float(), *weights.norm, EPS, backend="triton")
    if x.dtype == torch.float32:
        return exact
    rounded = exact.to(x.dtype)
    return torch.cat([rounded, exact.sub_(rounded).to(x.dtype)], -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``a @ b`` in float32."""
    if a.dtype == torch.float32 or a.is_cpu:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


forward_step, gradient_step = TritonAttentionForward, TritonAttentionGradients
"""Names of the classes by which :mod:`~.passes` finds them in the module of a backend."""
