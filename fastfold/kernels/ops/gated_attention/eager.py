"""Blocks of rows of gated self-attention in PyTorch, and the arrangement of its parameters for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.common.layout import part
from fastfold.kernels.common.parameters import with_exact_norms
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    normalize,
    normalize_backward,
    normalize_to,
)
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    add_product,
    centered,
    estimate,
    gradient_dtype,
    matrix_product,
    mean_of,
    multiplies_units,
    product_dtype,
    reduced,
    sample,
)
from fastfold.kernels.cpu.products import prefers_batched_products
from fastfold.kernels.ops.attention.eager import (
    Operands,
    attend,
    attend_backward,
    has_few_weights,
    split_by_head,
)
from fastfold.kernels.ops.attention.eager import prepare as prepare  # part of this module's interface

EPS = 1e-5

# Positions whose projections are made at once: enough for the full rate of the matrix product.
POSITIONS = 1024

backward_dtype = gradient_dtype  #: Dtype of the products of the backward pass


class GatedAttentionParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.gated_attention`, or their gradients.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import GatedAttentionParams, gated_attention
        >>> query, key, value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        >>> layers = [nn.LayerNorm(16), query, key, value, nn.Linear(16, 16), nn.Linear(16, 16)]
        >>> parameters = GatedAttentionParams(*nn.ModuleList(layers).parameters())
        >>> gated_attention(torch.randn(3, 5, 16), None, None, parameters, heads=4).shape
        torch.Size([3, 5, 16])
    """

    norm_weight: Tensor  #: ``[c]``, scale of the normalisation
    norm_bias: Tensor  #: ``[c]``, its shift
    query_weight: Tensor  #: ``[H D, c]``
    key_weight: Tensor  #: ``[H D, c]``
    value_weight: Tensor  #: ``[H D, c]``
    gate_weight: Tensor | None  #: ``[H D, c]``, or None for no gate
    gate_bias: Tensor | None  #: ``[H D]``, or None for no gate
    output_weight: Tensor  #: O ``[c, H D]``
    output_bias: Tensor  #: o ``[c]``

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> GatedAttentionParams:
        """Group the tensors of :meth:`present`."""
        norm_weight, norm_bias, query, key, value, *gate, output_weight, output_bias = tensors
        gate_weight, gate_bias, *_ = *gate, None, None
        return cls(
            *(norm_weight, norm_bias, query, key, value), gate_weight, gate_bias, output_weight, output_bias
        )

    def present(self) -> list[Tensor]:
        """Return the tensors that are not None: PyTorch computes no gradients of lists with None."""
        return [x for x in self if x is not None]


class Weights(NamedTuple):
    """Parameters as the passes use them, or their gradients."""

    norm: tuple[Tensor, Tensor]
    merged: Tensor  #: ``[3 H D or 4 H D, c]``, rows for queries, keys, values and gates
    bias: Tensor | None  #: ``[H D]`` of the gates, or None
    output: Tensor
    output_bias: Tensor
    #: ``[H D]``, estimate of the output projection's input that all positions have in common
    attended: Tensor | None = None
    merged_bias: Tensor | None = None  #: Bias of all rows of ``merged``, or None
    positions: int = 0  #: Number of positions to project, if known


def arrange(parameters: GatedAttentionParams, dtype: torch.dtype, positions: int = 0) -> Weights:
    """Arrange weights in ``dtype`` for a number of positions, and the norm in the dtype of accumulation."""
    p = with_exact_norms(parameters, dtype)
    merged, merged_bias = [p.query_weight, p.key_weight, p.value_weight], p.gate_bias
    if p.gate_weight is not None and merged_bias is not None:
        merged.append(p.gate_weight)
        # Within the product, so that gate logits are rounded once.
        merged_bias = torch.constant_pad_nd(merged_bias, (3 * merged_bias.shape[0], 0))
    return Weights(
        (p.norm_weight, p.norm_bias),
        torch.cat(merged),
        p.gate_bias,
        p.output_weight,
        p.output_bias,
        merged_bias=merged_bias,
        positions=positions,
    )


def zeros_like(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return zeros in the shapes of ``weights``, to sum their gradients in."""
    zeros = partial(torch.zeros_like, dtype=dtype)
    return Weights(
        norm=(zeros(weights.norm[0]), zeros(weights.norm[1])),
        merged=zeros(weights.merged),
        bias=None if weights.bias is None else zeros(weights.bias),
        output=zeros(weights.output),
        output_bias=zeros(weights.output_bias),
    )


def gradients_of(totals: Weights) -> GatedAttentionParams:
    """Split gradients into those of the parameters, as views; inverse of :func:`arrange`."""
    query, key, value, *gate = totals.merged.split(totals.output.shape[1])
    gates = (gate[0] if gate else None, totals.bias)
    return GatedAttentionParams(*totals.norm, query, key, value, *gates, totals.output, totals.output_bias)


def row_step(x: Tensor) -> int:
    """Return the number of rows per block of ``x [R, N, c]``, for the projections."""
    rows, length, _ = x.shape
    positions = POSITIONS
    if rows * length > POSITIONS and product_dtype(x) == torch.bfloat16:
        if x.numel() <= BLOCK_ELEMENTS:
            return rows
        positions = 2 * POSITIONS
    return max(1, positions // max(1, length))


def centered_on(x: Tensor, weights: Weights) -> Weights:
    """Move the mean over positions of ``x [*, c]`` into the bias of ``weights``, if products are reduced."""
    if reduced(weights.merged) is None:
        return weights
    norm, bias = centered(x, weights.norm, EPS, weights.merged, weights.merged_bias)
    attended = None
    if weights.merged_bias is not None:
        normed, *_ = normalize(sample(x).to(weights.merged.dtype), *norm, EPS)
        assert bias is not None
        # Rows of values and gates are the second half.
        value, gate = estimate(normed, weights.merged.chunk(2)[1], bias.chunk(2)[1]).chunk(2, -1)
        attended = mean_of(value).mul_(mean_of(gate.sigmoid()))
    return weights._replace(norm=norm, merged_bias=bias, attended=attended)


def projections(weights: Weights) -> PreparedLinear:
    """Return the product for queries, keys, values and gate logits at once."""
    return PreparedLinear(weights.merged, weights.merged_bias, least="int8", positions=weights.positions)


def project(normed: Tensor, linear: PreparedLinear, weights: Weights, heads: int, scratch: Scratch) -> Tensor:
    """Project ``normed [r, N, c]`` to queries, keys, values and gate logits ``[r, N, 3 or 4, H, D]``."""
    rows, length, _ = normed.shape
    out = linear(normed.flatten(0, 1), "projected", scratch)
    return out.view(rows, length, -1, heads, weights.output.shape[1] // heads)


class RowBlock(NamedTuple):
    """Operands of some rows or all, or their gradients; shapes with leading axes for all."""

    x: Tensor  #: ``[r, N, c]``
    bias: Tensor | None  #: Bias of their batch element, ``[H, N, N]``, or None
    mask: Tensor | None  #: ``[r, N]``, or None; of some rows as ``prepare`` returns it
    residual: Tensor | None = None  #: ``[r, N, c]`` or None
    dropout: Tensor | None = None  #: ``[r, N, c]`` or None


class Kept(NamedTuple):
    """Values of the forward pass that the backward pass reads, of some rows or with leading axes of all."""

    projected: Tensor  #: Projections by head, ``[3 or 4, r, H, N, D]``
    weights: Tensor | None  #: Weights of the keys, ``[r, H, N, N]``, or None

    @classmethod
    def of(cls, memory: Tensor, x: Tensor, parameters: GatedAttentionParams, heads: int) -> Kept:
        """Return the values of all rows as views of ``memory``, with :func:`kept_elements`."""
        *lead, length, _ = x.shape
        kinds, width = 3 if parameters.gate_weight is None else 4, len(parameters.query_weight)
        count = kinds * x.shape[:-1].numel() * width
        weights = memory[count:].view(*lead, heads, length, length) if len(memory) > count else None
        return cls(memory[:count].view(kinds, *lead, heads, length, width // heads), weights)

    def part(self, rows: tuple[int | slice, ...]) -> Kept:
        """Return the values of some rows."""
        return Kept(part(self.projected, (slice(None), *rows)), part(self.weights, rows))


def kept_elements(x: Tensor, parameters: GatedAttentionParams, heads: int) -> tuple[int, int]:
    """Return the numbers of projections and of weights in :class:`Kept` for all rows of ``x``."""
    length, positions, width = x.shape[-2], x.shape[:-1].numel(), len(parameters.query_weight)
    # Other scores never exist all at once.
    has_weights = multiplies_units(x) and has_few_weights(length, heads, width // heads)
    projections = (3 if parameters.gate_weight is None else 4) * positions * width
    return projections, positions * heads * length if has_weights else 0


def multiplies_scores(device: torch.device) -> bool:
    """Return True if scores of bfloat16 data are batched products, because no flash kernel is faster."""
    # Rounded scores would cause a third of the error of products in bfloat16 alone.
    return device.type == "cpu" and prefers_batched_products()


class AttentionForward:
    """Forward pass of blocks of rows, with the weights of :func:`arrange`."""

    def __init__(self, weights: Weights, heads: int) -> None:
        self._weights, self._heads = weights, heads
        self._projections = projections(weights)
        self._add, output_bias = None, weights.output_bias
        if weights.attended is not None:
            attended = weights.attended.to(product_dtype(weights.attended))
            self._add = attended.neg().view(heads, -1)
            output_bias = output_bias + torch.mv(weights.output, attended.to(weights.output.dtype))
        # This small projection would cause much of the error in 8 bits; see benchmarks/results/choices.md.
        self._output = PreparedLinear(weights.output, output_bias, least="bf16", positions=weights.positions)

    def begin(self, x: Tensor, scratch: Scratch) -> Tensor:
        """Compute projections ``[r, N, 3 or 4, H, D]`` of a block ``x [r, N, c]``, in the dtype of ``scratch``."""
        normed = normalize_to(scratch.dtype, x, self._weights.norm, EPS)
        projected = self._projections(normed.flatten(0, 1), "projected", scratch)
        channels = self._weights.output.shape[1] // self._heads
        return projected.view(*x.shape[:2], -1, self._heads, channels)

    def __call__(
        self,
        out: Tensor,
        rows: RowBlock,
        scratch: Scratch,
        projected: Tensor | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Fill ``out [r, N, c]``, which may be ``x`` or the residual, and ``kept``.

        ``projected`` is the result of :meth:`begin`.
        """
        x, bias, masked, residual, dropout = rows
        is_own = projected is None
        projected = self.begin(x, scratch) if projected is None else projected.to(scratch.dtype)
        place, key_weights = (None, None) if kept is None else kept
        by_products = key_weights is not None or (x.dtype == torch.bfloat16 and multiplies_scores(x.device))
        by_head = by_products or scratch.dtype != torch.bfloat16 or kept is not None
        q, k, v, *gate = split_by_head(projected, scratch, place) if by_head else projected.unbind(2)
        count, length, kinds, heads, channels = projected.shape
        # Projections that were split are free to hold the result.
        if by_head and is_own:
            attended = projected.view(kinds, count, length, heads, channels)[0]
        else:
            attended = scratch("attended", count, length, heads, channels)
        attend(
            attended,
            Operands(q, k, v, bias, masked, gate[0] if gate else None),
            channels**-0.5,
            scratch,
            add=self._add,
            by_head=by_head,
            by_products=by_products,
            keep_gate=kept is not None,
            weights=key_weights,
        )
        self._output.update(
            out, attended.view(count * length, heads * channels), residual, dropout, scratch=scratch
        )


def empty_normalized(x: Tensor) -> list[Tensor]:
    """Return uninitialised results of :meth:`AttentionGradients.begin` before the projections."""
    statistics = [x.new_empty(*x.shape[:-1], 1, dtype=accumulation_dtype(x)) for _ in range(2)]
    return [x.new_empty(x.shape, dtype=backward_dtype(x)), *statistics]


class AttentionGradients:
    """Gradients of blocks of rows, in the dtype of the weights of :func:`arrange`."""

    def __init__(self, weights: Weights, heads: int, needs_parameters: bool) -> None:
        self._weights, self._heads, self._needs_parameters = weights, heads, needs_parameters
        self._projections: PreparedLinear | None = None

    def begin(self, x: Tensor, scratch: Scratch) -> list[Tensor]:
        """Compute the values for the gradients of a block that need only ``x [r, N, c]``.

        Returns:
            Normalised ``[r, N, c]``, both statistics ``[r, N, 1]``, and projections ``[r, N, 3 or 4, H, D]``.
        """
        if self._projections is None:
            self._projections = projections(self._weights)
        normed, *statistics = normalize(scratch.contiguous("x", x), *self._weights.norm, EPS)
        projected = project(normed, self._projections, self._weights, self._heads, scratch)
        return [normed, *statistics, projected]

    def __call__(
        self,
        grad: Tensor,
        rows: RowBlock,
        grad_bias: Tensor | None,
        totals: Weights | None,
        scratch: Scratch,
        projections: Sequence[Tensor] = (),
        kept: Kept | None = None,
    ) -> tuple[Tensor, Weights | None]:
        """Compute gradients of a block of rows, from that of its result ``[r, N, c]``.

        The bias's gradients ``[H, N, N]`` and the parameters', if they are needed, are added to ``grad_bias`` and
        ``totals``. ``projections`` is the result of :meth:`begin` if it was called before, and ``kept`` what
        :class:`AttentionForward` kept. The buffers have the dtype of the products.

        Returns:
            Gradient of ``x [r, N, c]``, and the totals.
        """
        weights = self._weights
        x, bias, masked, _, dropout = rows
        x = scratch.contiguous("x", x)
        if kept is None:
            normed, *statistics, projected = projections or self.begin(x, scratch)
            q, k, v, *gate = projected.unbind(2)
        else:
            normed, *statistics = normalize(x, *weights.norm, EPS)
            q, k, v, *gate = kept.projected.transpose(2, 3).unbind()
        if dropout is None:
            grad = scratch.contiguous("grad_update", grad).flatten(0, 1)
        else:
            grad = scratch.copy("grad_update", grad).mul_(dropout).flatten(0, 1)
        grad_attended = matrix_product(
            grad, weights.output, scratch("grad_attended", len(grad), weights.output.shape[1])
        )
        grad_projected = scratch("grad_projected", *x.shape[:2], len(weights.merged))
        grads = grad_projected.unflatten(-1, (-1, *q.shape[2:])).unbind(2)
        attended = scratch("attended", *q.shape) if self._needs_parameters else None
        attend_backward(
            grad_attended.view(q.shape),
            Operands(q, k, v, bias, masked, gate[0] if gate else None),
            Operands(grads[0], grads[1], grads[2], grad_bias, None, grads[3] if gate else None),
            q.shape[-1] ** -0.5,
            scratch,
            attended,
            None if kept is None else kept.weights,
        )
        grad_projected = grad_projected.flatten(0, 1)
        grad_norm: tuple[Tensor | None, Tensor | None] = None, None
        if self._needs_parameters:
            assert totals is not None
            assert attended is not None
            grad_norm = totals.norm
            add_product(totals.output, grad.t(), attended.view(len(grad), -1), scratch, rows.x)
            totals.output_bias.add_(grad.sum(0))
            add_product(totals.merged, grad_projected.t(), normed.flatten(0, 1), scratch, rows.x)
            if totals.bias is not None:
                totals.bias.add_(grad_projected[:, -len(totals.bias) :].sum(0))
        grad_normed = matrix_product(
            grad_projected, weights.merged, scratch("grad_normed", *normed.flatten(0, 1).shape)
        )
        grad_x = normalize_backward(grad_normed.view(x.shape), x, statistics, *weights.norm, *grad_norm)
        return grad_x, totals


forward_step, gradient_step = AttentionForward, AttentionGradients
"""Names of the classes by which :mod:`~.passes` finds them in the module of a backend."""
