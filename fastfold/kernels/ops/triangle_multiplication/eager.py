"""PyTorch path of triangle multiplication: both halves in blocks of positions, a group of channels between them.

Between the two halves the channels come first, ``[c, R, N]`` for R rows of the pair. The backward passes recompute
everything from their inputs, and add to the gradients of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.parameters import with_exact_norms, zeros_of
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    at_positions,
    block_positions,
    finish,
    gradient_positions,
    normalize,
    normalize_backward,
    normalize_to,
    position_blocks,
    share_of,
)
from fastfold.kernels.cpu.block_threads import for_positions, sum_blocks
from fastfold.kernels.cpu.linear import (
    Norm,
    PreparedLinear,
    add_product,
    add_products,
    centered,
    gradient_dtype,
    matrix_product,
    product_dtype,
    requested_products,
)
from fastfold.kernels.ops.triangle_multiplication.params import (
    EPS,
    FACTOR_LAYERS,
    UPDATE_LAYERS,
    FactorParams,
    UpdateParams,
)

_glu: Any = torch._C._nn.glu  #: Binding that starts faster than that of ``torch.ops``


class FactorWeights(NamedTuple):
    """Parameters of the first half as its passes use them, or their gradients."""

    norm: Norm
    projections: Tensor  #: ``[4 c, c_z]``, projection and gate of ``left``, then of ``right``
    projections_bias: Tensor  #: ``[4 c]``


def arrange_factors(parameters: FactorParams, dtype: torch.dtype) -> FactorWeights:
    """Arrange weights in ``dtype``, and the norm in the dtype of accumulation."""
    p = with_exact_norms(parameters, dtype)
    (left, right), (left_gate, right_gate) = p.proj_weight.chunk(2), p.gate_weight.chunk(2)
    projections = torch.cat([left, left_gate, right, right_gate])
    (left, right), (left_gate, right_gate) = p.proj_bias.chunk(2), p.gate_bias.chunk(2)
    bias = torch.cat([left, left_gate, right, right_gate])
    return FactorWeights((p.norm_weight, p.norm_bias), projections, bias)


def factor_gradients(grads: FactorWeights) -> tuple[Tensor, ...]:
    """Split gradients into those of the parameters; inverse of :func:`arrange_factors`."""
    projection, gate = (x.flatten(0, 1) for x in grads.projections.unflatten(0, (2, 2, -1)).unbind(1))
    biases = grads.projections_bias.unflatten(0, (2, 2, -1)).unbind(1)
    projection_bias, gate_bias = (x.flatten() for x in biases)
    return *grads.norm, projection, projection_bias, gate, gate_bias


def of_channels(weights: FactorWeights, first: int, count: int) -> FactorWeights:
    """Return the parameters of ``count`` hidden channels from ``first`` on."""
    c = weights.projections.shape[0] // 4

    def chosen(x: Tensor) -> Tensor:
        return x.unflatten(0, (4, c))[:, first : first + count].flatten(0, 1)

    return weights._replace(
        projections=chosen(weights.projections), projections_bias=chosen(weights.projections_bias)
    )


def unless_ones(mask: Tensor) -> tuple[Tensor, ...]:
    """Return ``mask [R, N]`` as ``[R, N, 1]``, or nothing if it is one everywhere; it is not empty."""
    lowest, highest = mask.aminmax()
    return () if lowest.item() == highest.item() == 1 else (mask[..., None],)


def _blocks(size: int, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yield blocks of ``size`` positions of ``[R, N, *]`` tensors, with their columns in a ``[c, R N]`` one."""
    start = 0
    for parts in position_blocks(size, *tensors):
        stop = start + parts[0].shape[0]
        yield slice(start, stop), parts
        start = stop


def _normalize(
    x: Tensor, parameters: Norm, dtype: torch.dtype, eps: float = EPS
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the normalised block in ``dtype`` and its statistics."""
    scale, shift = parameters
    out, mean, rstd = normalize(x.to(scale.dtype), scale, shift, eps)
    return out.to(dtype), (mean, rstd)


def _output(
    b_x: Tensor, b_product: Tensor, project: PreparedLinear, gate: PreparedLinear, scratch: Scratch
) -> Tensor:
    """Compute output projection and output gate logits ``[n, 2 c_z]``."""
    out = scratch("output", b_x.shape[0], 2 * b_x.shape[1])
    b_update, b_gate = out.chunk(2, -1)
    project.fill(b_update, b_product, scratch)
    gate.fill(b_gate, b_x, scratch)
    return out


def channel_group(c: int, positions: int) -> int:
    """Return the channels whose factors exist at a time: a quarter, or all if small."""
    return c if 2 * c * positions <= BLOCK_ELEMENTS else max(1, c // 4)


_KEPT = 2**25
"""Maximum elements of projections that a backward pass keeps from their first use to their second."""


def keeps_projections(c: int, pairs: int) -> bool:
    """Return True if the backward pass keeps the projections of ``pairs``, with ``c`` hidden channels."""
    return 4 * c * pairs <= _KEPT


class TriangleForward:
    """Operations before and after the contraction for one batch element, in blocks of positions.

    ``dtype`` is that of factors and product, and ``share`` the factor of the product that :meth:`write` expects.

    Args:
        factors: Parameters of the first part, if it is used.
        update: Parameters of the second part, if it is used.
        scratch: Buffers, in the dtype of the products.
        summands: Number of summands of each element of the product, if it may be a share of their sum; see
            :func:`~fastfold.kernels.common.scratch.share_of`.
    """

    _block_size: int | None = None  #: Positions of a block of factors; None for those of a forward pass
    _projected: Tensor | None = None  #: Memory of :meth:`keep`, or None
    _is_filled = False  #: True if an earlier pass filled this memory

    def __init__(
        self, factors: FactorParams | None, update: UpdateParams | None, scratch: Scratch, summands: int = 1
    ) -> None:
        self.dtype = scratch.dtype if requested_products() is None else product_dtype(scratch)
        self._scratch = scratch if self.dtype == scratch.dtype else scratch.of(scratch, self.dtype)
        self.share = share_of(summands, scratch.dtype)
        self._factors = None if factors is None else arrange_factors(factors, scratch.dtype)
        self._update = None if update is None else with_exact_norms(update, scratch.dtype)
        #: Channels per position of the buffers of the second part
        self._update_width = 0 if update is None else 4 * max(update.out_weight.shape)

    def width(self, n: int) -> int:
        """Return the rows and columns W of factors for a pair of N, padded with zeros; here N."""
        return n

    def keep(self, projected: Tensor, pairs: int, *, is_filled: bool = False) -> None:
        """Keep projections ``[4 c R N]`` of all channels and ``pairs`` R N, or read those that another pass kept.

        They are those of one block of :func:`gradient_positions` after the other.
        """
        assert self._factors is not None
        self._projected, self._is_filled = projected, is_filled
        self._block_size = gradient_positions(len(self._factors.projections), pairs, self.dtype)

    def _kept(self, columns: slice) -> Tensor | None:
        """Return the kept projections ``[4 c, n]`` of a block."""
        if self._projected is None:
            return None
        assert self._factors is not None
        count, size = len(self._factors.projections), columns.stop - columns.start
        return self._projected[count * columns.start : count * columns.stop].view(count, size)

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """Fill ``projections [2 count, W, W]``: channels from ``first`` of the left factor, then of the right one."""
        assert self._factors is not None
        weights, factors = self._factors, projections.view(2, count, -1)
        if 4 * count < weights.projections.shape[0]:
            weights = of_channels(weights, first, count)
        norm = weights.norm
        bias: Tensor | None = weights.projections_bias
        if requested_products() is not None:
            norm, bias = centered(z, norm, EPS, weights.projections, bias)
        linear = PreparedLinear(weights.projections, bias)

        def block(scratch: Scratch, columns: slice, b_z: Tensor, *b_mask: Tensor) -> None:
            b_both = None if self._projected is None else self._kept(columns)
            if b_both is None or not self._is_filled:
                b_x = normalize_to(scratch.dtype, b_z, norm, EPS)
                computed = linear.by_channel(b_x, "projections", scratch)
                b_both = computed if b_both is None else b_both.copy_(computed)
            is_whole = b_z.shape[0] == factors.shape[-1]  # every view costs host time
            b_factors = factors if is_whole else factors[:, :, columns]
            # Projection and gate logits of left, and of right: [2, 2 c, n].
            _glu(b_both.view(2, -1, b_z.shape[0]), 1, out=b_factors)
            for b_keep in b_mask:
                b_factors.mul_(b_keep.t())

        widest = weights.projections.shape[0]
        for_positions(block, widest, self._scratch, z, *unless_ones(mask), size=self._block_size)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """Fill rows of the result ``[rows, N, c_z]`` from those of the product ``[c, rows, W]`` times its share.

        For all rows, the product may have W of them. ``out`` may be ``z`` or ``residual``.
        """
        assert self._update is not None
        weights, product = self._update, product.flatten(1)
        residuals = () if residual is None else (residual,)
        out_eps = EPS * self.share**2
        norm = weights.norm_weight, weights.norm_bias
        norm_out = weights.norm_out_weight, weights.norm_out_bias
        out_bias: Tensor | None = weights.out_bias
        gate_bias: Tensor | None = weights.out_gate_bias
        if requested_products() is not None:
            norm, gate_bias = centered(z, norm, EPS, weights.out_gate_weight, gate_bias)
            norm_out, out_bias = centered(product.t(), norm_out, out_eps, weights.out_weight, out_bias)
        # These small projections would cause much of the error in 8 bits; see benchmarks/results/choices.md.
        in_bfloat16 = self.dtype == torch.bfloat16
        project = PreparedLinear(weights.out_weight, out_bias, least="bf16")
        gate = PreparedLinear(weights.out_gate_weight, gate_bias, sigmoid=in_bfloat16, least="bf16")

        def block(
            scratch: Scratch, columns: slice, b_z: Tensor, b_out: Tensor, b_residual: Tensor | None = None
        ) -> None:
            b_x = normalize_to(scratch.dtype, b_z, norm, EPS)
            b_product = product if b_x.shape[0] == product.shape[1] else product[:, columns]
            b_product = scratch.transpose("product by rows", b_product)
            b_product = normalize_to(scratch.dtype, b_product, norm_out, out_eps)
            if in_bfloat16:
                b_update = project.gated(b_product, gate(b_x, "gate", scratch), scratch)
            else:
                b_update = scratch("update", *b_out.shape)
                _glu(_output(b_x, b_product, project, gate, scratch), -1, out=b_update)
            b_dropout = None if dropout is None else at_positions(dropout, columns)
            finish(b_out, b_update, b_residual, b_dropout)

        for_positions(block, self._update_width, self._scratch, z, out, *residuals)


class TriangleGradients(TriangleForward):
    """Gradients for one batch element, in blocks of positions; it sums the gradients of the parameters.

    Gradients of factors and product are padded with zeros as they are, and have a dtype that holds any sum.
    ``channels`` are the hidden ones. Gradients of a half's layers are zeros if none of them is ``needed``.
    """

    def __init__(
        self,
        factors: FactorParams | None,
        update: UpdateParams | None,
        z: Tensor,
        needed: Collection[str],
        summands: int = 1,
    ) -> None:
        scratch, exact = Scratch().of(z, gradient_dtype(z)), accumulation_dtype(z)
        super().__init__(factors, update, scratch, summands)
        self.dtype, self._scratch = scratch.dtype, scratch
        self._pairs = z.shape[-3] * z.shape[-2]
        self._needs_factor_layers = not set(needed).isdisjoint(FACTOR_LAYERS)
        self._needs_update_layers = not set(needed).isdisjoint(UPDATE_LAYERS)
        if factors is not None:
            self._factor_totals = arrange_factors(zeros_of(factors, exact), exact)
            self.channels = factors.proj_weight.shape[0] // 2
        if update is not None:
            self._update_totals = zeros_of(update, exact)

    def _positions(self, channels: int) -> int:
        return gradient_positions(channels, self._pairs, self.dtype)

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """See :meth:`TriangleForward.project`; small projections are kept for :meth:`factors_backward`."""
        if self._projected is None and keeps_projections(self.channels, self._pairs):
            self.keep(z.new_empty(4 * self.channels * self._pairs, dtype=self.dtype), self._pairs)
        super().project(projections, z, mask, first, count)

    def contraction_groups(self, n: int) -> tuple[int, int]:
        """Return the numbers of channels contracted at a time, forward and backward; matrices stay in the cache."""
        group = max(1, BLOCK_ELEMENTS // 2 // (n * n))
        return group, group

    def update_backward(
        self, grad_z: Tensor, product: Tensor, grad: Tensor, z: Tensor, dropout: Tensor | None
    ) -> None:
        """Replace ``product [c, W, W]`` by its gradient, and write that of the normalised ``z`` to ``grad_z``.

        The input is the product times its share; the gradient is that of the product without it.
        """
        assert self._update is not None
        weights, product = self._update, product.flatten(1)
        norm = weights.norm_weight, weights.norm_bias
        norm_out = weights.norm_out_weight, weights.norm_out_bias
        project = PreparedLinear(weights.out_weight, weights.out_bias)
        gate = PreparedLinear(weights.out_gate_weight, weights.out_gate_bias)

        def block(scratch: Scratch, totals: UpdateParams, columns: slice, parts: tuple[Tensor, ...]) -> None:
            b_z, b_grad, b_grad_x = parts
            if dropout is None:
                b_grad = scratch.contiguous("grad", b_grad)
            else:
                b_grad = scratch.copy("grad", b_grad).mul_(at_positions(dropout, columns))
            b_x, _ = _normalize(b_z, norm, scratch.dtype)
            b_product = scratch.transpose("product by rows", product[:, columns])
            b_normed, statistics = _normalize(b_product, norm_out, scratch.dtype)
            b_output = _output(b_x, b_normed, project, gate, scratch)
            b_grad_output = scratch("grad_output", *b_output.shape)
            torch.ops.aten.glu_backward(b_grad, b_output, -1, grad_input=b_grad_output)
            b_grad_out, b_grad_gate = b_grad_output.chunk(2, -1)
            if self._needs_update_layers:
                add_product(totals.out_weight, b_grad_out.t(), b_normed, scratch, z)
                add_product(totals.out_gate_weight, b_grad_gate.t(), b_x, scratch, z)
                biases = (totals.out_bias, totals.out_gate_bias)
                for total, part in zip(biases, b_grad_output.sum(0).chunk(2), strict=True):
                    total += part
            matrix_product(b_grad_gate, weights.out_gate_weight, b_grad_x)
            b_grad_normed = scratch("grad_normed", *b_product.shape)
            matrix_product(b_grad_out, weights.out_weight, b_grad_normed)
            of_norm = totals.norm_out_weight, totals.norm_out_bias
            b_grad_product = normalize_backward(b_grad_normed, b_product, statistics, *norm_out, *of_norm)
            product[:, columns] = b_grad_product.t()

        blocks = _blocks(self._positions(self._update_width), z, grad, grad_z)
        sum_blocks(block, blocks, self._scratch, self._update_totals)

    def factors_backward(
        self, grad_z: Tensor, grad_factors: Tensor, z: Tensor, mask: Tensor, add: Tensor | None
    ) -> None:
        """Turn ``grad_z`` into the gradient of ``z``, plus ``add``, from gradients of the factors ``[2 c, W, W]``."""
        assert self._factors is not None
        weights, grad_factors = self._factors, grad_factors.flatten(1)
        adds = () if add is None else (add,)
        linear = PreparedLinear(weights.projections, weights.projections_bias)

        def block(scratch: Scratch, totals: FactorWeights, columns: slice, parts: tuple[Tensor, ...]) -> None:
            b_z, b_grad_x, *rest = parts
            b_add, b_mask = (None, rest) if add is None else (rest[0], rest[1:])
            b_z = b_z.to(weights.projections.dtype)
            b_x, statistics = _normalize(b_z, weights.norm, scratch.dtype)
            b_grad_both = scratch("grad_projections", len(weights.projections), len(b_x))
            b_both = self._kept(columns)
            if b_both is None:
                b_both = linear.by_channel(b_x, "projections", scratch)
            halves = zip(grad_factors.chunk(2), b_both.chunk(2), b_grad_both.chunk(2), strict=True)
            for grad, b_pre, b_out in halves:
                b_grad = grad[:, columns]
                for b_keep in b_mask:
                    b_grad = torch.mul(b_grad, b_keep.t(), out=scratch("masked", *b_grad.shape))
                torch.ops.aten.glu_backward(b_grad, b_pre, 0, grad_input=b_out)
            if self._needs_factor_layers:
                add_product(totals.projections, b_grad_both, b_x, scratch, z)
                totals.projections_bias.add_(b_grad_both.sum(1))
            add_products(b_grad_x, b_grad_both.t(), weights.projections, scratch)
            b_result = normalize_backward(b_grad_x, b_z, statistics, *weights.norm, *totals.norm)
            finish(b_grad_x, b_result, b_add, None)

        size = self._positions(len(weights.projections))
        blocks = _blocks(size, z, grad_z, *adds, *unless_ones(mask))
        sum_blocks(block, blocks, self._scratch, self._factor_totals)

    def norm_backward(self, grad_z: Tensor, z: Tensor) -> Tensor:
        """Return the gradient of ``z`` if only the update depends on it."""
        assert self._update is not None
        weights, totals = self._update, self._update_totals
        norm, of_norm = (weights.norm_weight, weights.norm_bias), (totals.norm_weight, totals.norm_bias)
        for i in batch_elements(z):
            for _, (b_z, b_grad_x) in _blocks(block_positions(self._update_width), z[i], grad_z[i]):
                b_z = b_z.to(weights.out_weight.dtype)
                _, statistics = _normalize(b_z, norm, b_z.dtype)
                b_grad_x.copy_(normalize_backward(b_grad_x, b_z, statistics, *norm, *of_norm))
        return grad_z

    def factor_grads(self) -> tuple[Tensor, ...]:
        """Return gradients of the parameters of the first part."""
        return factor_gradients(self._factor_totals)

    def update_grads(self) -> tuple[Tensor, ...]:
        """Return gradients of the parameters of the second part."""
        return self._update_totals


forward_steps, gradient_steps = TriangleForward, TriangleGradients
"""Names of the classes by which :mod:`~.passes` finds them in the module of a backend."""
