"""PyTorch path of triangle multiplication: both halves in blocks of positions, a group of channels between them.

Between the two halves the channels come first, ``[c, R, N]`` for R rows of the pair. The backward passes recompute
everything from their inputs, and add to the gradients of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.parameters import zeros_of
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    at_positions,
    block_positions,
    finish,
    normalise,
    normalise_backward,
    position_blocks,
    share_of,
)
from fastfold.kernels.cpu.block_threads import for_blocks, forward_positions, sum_blocks
from fastfold.kernels.cpu.centring import centred
from fastfold.kernels.cpu.linear import Least, Linear, product_dtype
from fastfold.kernels.ops.triangle_multiplication.eager_weights import (
    FactorWeights,
    Norm,
    UpdateWeights,
    arrange_factors,
    arrange_update,
    factor_gradients,
    of_channels,
    update_gradients,
)
from fastfold.kernels.ops.triangle_multiplication.params import EPS, FactorParams, UpdateParams


def unless_ones(mask: Tensor) -> tuple[Tensor, ...]:
    """Return ``mask [R, N]`` as ``[R, N, 1]``, or nothing if it is one everywhere."""
    return () if bool((mask == 1).all()) else (mask[..., None],)


def write_factors(
    projections: Tensor, z: Tensor, masks: tuple[Tensor, ...], weights: FactorWeights, scratch: Scratch
) -> None:
    """Fill ``projections [2 c, R N]``, of any dtype, with both factors of the contraction, gated and masked."""
    # A result that is rounded to bfloat16 gains nothing from 8 bits, which take longer.
    least: Least = "bf16" if projections.dtype == torch.bfloat16 else "int8x2"
    norm, bias = centred(z, weights.norm, EPS, weights.projections, weights.projections_bias.flatten())
    linear = Linear(weights.projections, bias, least=least)

    def block(scratch: Scratch, columns: slice, parts: tuple[Tensor, ...]) -> None:
        b_z, *b_mask = parts
        b_x, _ = _normalise(b_z, norm, scratch.dtype)
        for factor, b_projections in zip(
            projections.chunk(2), _projections(b_x, linear, scratch), strict=True
        ):
            b_factor = out = factor[:, columns]
            if out.dtype != scratch.dtype:
                b_factor = scratch("factor", *out.shape)
            torch.ops.aten.glu(b_projections, 0, out=b_factor)
            for b_keep in b_mask:
                b_factor.mul_(b_keep.t())
            if b_factor is not out:
                out.copy_(b_factor)

    size = forward_positions(len(weights.projections), z.shape[:-1].numel())
    for_blocks(block, _blocks(size, z, *masks), scratch)


def factors_backward(
    grad_z: Tensor,
    grad_factors: Tensor,
    inputs: tuple[Tensor, tuple[Tensor, ...], Tensor | None],
    weights: FactorWeights,
    totals: FactorWeights,
    scratch: Scratch,
) -> None:
    """Turn ``grad_z [R, N, c_z]``, other shares of the gradient of the normalised ``z``, into the gradient of ``z``.

    The inputs are ``z [R, N, c_z]``, its mask (see :func:`unless_ones`), and ``[R, N, c_z]`` to add to the gradient.
    ``grad_factors`` is ``[2 c, R N]``. The gradients of the parameters are added to ``totals``. Weights, buffers and
    ``grad_z`` have the same exact dtype.
    """
    z, masks, add = inputs
    adds = () if add is None else (add,)
    linear = Linear(weights.projections, weights.projections_bias.flatten())

    def block(scratch: Scratch, totals: FactorWeights, columns: slice, parts: tuple[Tensor, ...]) -> None:
        b_z, b_grad_x, *rest = parts
        b_add, b_mask = (None, rest) if add is None else (rest[0], rest[1:])
        b_z = b_z.to(weights.projections.dtype)
        b_x, statistics = _normalise(b_z, weights.norm, scratch.dtype)
        b_grad_both = scratch("grad_projections", len(weights.projections), len(b_x))
        b_both = _projections(b_x, linear, scratch)
        for grad, b_pre, b_out in zip(grad_factors.chunk(2), b_both, b_grad_both.chunk(2), strict=True):
            b_grad = grad[:, columns]
            for b_keep in b_mask:
                b_grad = torch.mul(b_grad, b_keep.t(), out=scratch("masked", *b_grad.shape))
            torch.ops.aten.glu_backward(b_grad, b_pre, 0, grad_input=b_out)
        totals.projections.addmm_(b_grad_both, b_x)
        totals.projections_bias.add_(b_grad_both.sum(1, keepdim=True))
        b_grad_x.addmm_(b_grad_both.t(), weights.projections)
        b_result = normalise_backward(b_grad_x, b_z, statistics, *weights.norm, *totals.norm)
        finish(b_grad_x, b_result, b_add, None)

    size = block_positions(len(weights.projections))
    sum_blocks(block, _blocks(size, z, grad_z, *adds, *masks), scratch, totals)


def write_update(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    weights: UpdateWeights,
    scratch: Scratch,
    *,
    share: float = 1.0,
) -> None:
    """Fill ``out [R, N, c_z]``, which may be ``z`` or ``residual``, from ``product [c, R N]`` times ``share``."""
    residuals = () if residual is None else (residual,)
    out_eps = EPS * share**2
    norm, gate_bias = centred(z, weights.norm, EPS, weights.gate, weights.gate_bias)
    norm_out, out_bias = centred(product.t(), weights.norm_out, out_eps, weights.out, weights.out_bias)
    # These small projections would cause much of the error in 8 bits; see benchmarks/results/choices.md.
    linears = Linear(weights.out, out_bias, least="bf16"), Linear(weights.gate, gate_bias, least="bf16")

    def block(scratch: Scratch, columns: slice, parts: tuple[Tensor, ...]) -> None:
        b_z, b_out, *b_residual = parts
        b_x, _ = _normalise(b_z, norm, scratch.dtype)
        b_product = scratch.of(b_z, product.dtype).transpose("product by rows", product[:, columns])
        b_product, _ = _normalise(b_product, norm_out, scratch.dtype, out_eps)
        b_update = scratch("update", *b_out.shape)
        torch.ops.aten.glu(_output(b_x, b_product, linears, scratch), -1, out=b_update)
        b_dropout = None if dropout is None else at_positions(dropout, columns)
        finish(b_out, b_update, b_residual[0] if b_residual else None, b_dropout)

    size = forward_positions(_widest(weights), z.shape[:-1].numel())
    for_blocks(block, _blocks(size, z, out, *residuals), scratch)


def update_backward(
    grad_x: Tensor,
    product: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    weights: UpdateWeights,
    totals: UpdateWeights,
    scratch: Scratch,
) -> None:
    """Replace ``product [c, R N]`` by its gradient, and write that of the normalised ``z`` to ``grad_x [R, N, c_z]``.

    The inputs are the gradient of the update ``[R, N, c_z]``, ``z [R, N, c_z]``, and its dropout's factors or None. The
    gradients of the parameters except for the norm of ``z`` are added to ``totals``. Weights, buffers, ``grad_x`` and
    ``product`` have the same exact dtype.
    """
    grad, z, dropout = inputs
    linears = Linear(weights.out, weights.out_bias), Linear(weights.gate, weights.gate_bias)

    def block(scratch: Scratch, totals: UpdateWeights, columns: slice, parts: tuple[Tensor, ...]) -> None:
        b_z, b_grad, b_grad_x = parts
        b_grad = scratch.copy("grad", b_grad)
        if dropout is not None:
            b_grad.mul_(at_positions(dropout, columns))
        b_x, _ = _normalise(b_z, weights.norm, scratch.dtype)
        b_product = scratch.transpose("product by rows", product[:, columns])
        b_normed, statistics = _normalise(b_product, weights.norm_out, scratch.dtype)
        b_output = _output(b_x, b_normed, linears, scratch)
        b_grad_output = scratch("grad_output", *b_output.shape)
        torch.ops.aten.glu_backward(b_grad, b_output, -1, grad_input=b_grad_output)
        b_grad_out, b_grad_gate = b_grad_output.chunk(2, -1)
        totals.out.addmm_(b_grad_out.t(), b_normed)
        totals.gate.addmm_(b_grad_gate.t(), b_x)
        biases = (totals.out_bias, totals.gate_bias)
        for total, part in zip(biases, b_grad_output.sum(0).chunk(2), strict=True):
            total += part
        torch.mm(b_grad_gate, weights.gate, out=b_grad_x)
        b_grad_normed = torch.mm(b_grad_out, weights.out, out=scratch("grad_normed", *b_product.shape))
        b_grad_product = normalise_backward(
            b_grad_normed, b_product, statistics, *weights.norm_out, *totals.norm_out
        )
        product[:, columns] = b_grad_product.t()

    sum_blocks(block, _blocks(block_positions(_widest(weights)), z, grad, grad_x), scratch, totals)


def norm_backward(grad_x: Tensor, z: Tensor, weights: UpdateWeights, totals: UpdateWeights) -> None:
    """Turn ``grad_x [R, N, c_z]``, the gradient of the normalised ``z``, into that of ``z``."""
    for _, (b_z, b_grad_x) in _blocks(block_positions(_widest(weights)), z, grad_x):
        b_z = b_z.to(weights.out.dtype)
        _, statistics = _normalise(b_z, weights.norm, b_z.dtype)
        b_grad_x.copy_(normalise_backward(b_grad_x, b_z, statistics, *weights.norm, *totals.norm))


def _widest(weights: UpdateWeights) -> int:
    """Return the channels per position of a block's buffers."""
    return 4 * max(weights.out.shape)


def _blocks(size: int, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yield blocks of ``size`` positions of ``[R, N, *]`` tensors, with their columns in a ``[c, R N]`` one."""
    start = 0
    for parts in position_blocks(size, *tensors):
        yield slice(start, start + len(parts[0])), parts
        start += len(parts[0])


def _normalise(
    x: Tensor, parameters: Norm, dtype: torch.dtype, eps: float = EPS
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the normalised block in ``dtype`` and its statistics."""
    scale, shift = parameters
    out, mean, rstd = normalise(x.to(scale.dtype), scale, shift, eps)
    return out.to(dtype), (mean, rstd)


def _projections(b_x: Tensor, linear: Linear, scratch: Scratch) -> tuple[Tensor, ...]:
    """Compute projection and gate logits ``[2 c, n]`` of ``left``, and of ``right``."""
    return linear.by_channel(b_x, "projections", scratch).chunk(2)


def _output(b_x: Tensor, b_product: Tensor, linears: tuple[Linear, Linear], scratch: Scratch) -> Tensor:
    """Compute output projection and output gate logits ``[n, 2 c_z]``."""
    out = scratch("output", len(b_x), 2 * b_x.shape[1])
    for linear, b_in, b_out in zip(linears, (b_product, b_x), out.chunk(2, -1), strict=True):
        linear.fill(b_out, b_in, scratch)
    return out


def channel_group(c: int, positions: int) -> int:
    """Return the channels whose factors exist at a time: a quarter, or all if small."""
    return c if 2 * c * positions <= BLOCK_ELEMENTS else max(1, c // 4)


class Forward:
    """Operations before and after the contraction, in blocks of positions.

    See :class:`~fastfold.kernels.ops.triangle_multiplication.contraction.TriangleBackend`.

    Args:
        factors: Parameters of the first part, if it is used.
        update: Parameters of the second part, if it is used.
        scratch: Buffers, in the dtype of the products.
        summands: Number of summands of each element of the product, if it may be a share of their sum; see
            :func:`~fastfold.kernels.common.scratch.share_of`.
    """

    def __init__(
        self, factors: FactorParams | None, update: UpdateParams | None, scratch: Scratch, summands: int = 1
    ) -> None:
        self.dtype, self._scratch = product_dtype(scratch), scratch
        self.share = share_of(summands, scratch.dtype)
        self._factors = None if factors is None else arrange_factors(factors, scratch.dtype)
        self._update = None if update is None else arrange_update(update, scratch.dtype)

    def width(self, n: int) -> int:
        """Return the pair's own number of rows."""
        return n

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """Compute the factors of some channels."""
        assert self._factors is not None
        weights = of_channels(self._factors, first, count)
        write_factors(projections.flatten(1), z, unless_ones(mask), weights, self._scratch)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """Compute the result."""
        assert self._update is not None
        how = (self._update, self._scratch)
        write_update(out, product.flatten(1), z, residual, dropout, *how, share=self.share)


class Backward(Forward):
    """Gradients, in blocks of positions and in the dtype of accumulation, which holds any sum.

    See :class:`~fastfold.kernels.ops.triangle_multiplication.contraction.TriangleGradients`.
    """

    def __init__(
        self,
        factors: FactorParams | None,
        update: UpdateParams | None,
        z: Tensor,
        needed: Collection[str],
        summands: int = 1,
    ) -> None:
        super().__init__(factors, update, Scratch().of(z, accumulation_dtype(z)), summands)
        self.dtype = accumulation_dtype(z)
        if factors is not None:
            self._factor_totals = arrange_factors(zeros_of(factors, self.dtype), self.dtype)
            self.channels = factors.proj_weight.shape[0] // 2
        if update is not None:
            self._update_totals = arrange_update(zeros_of(update, self.dtype), self.dtype)

    def contraction_groups(self, n: int) -> tuple[int, int]:
        """Return group sizes whose matrices stay in the cache."""
        group = max(1, BLOCK_ELEMENTS // 2 // (n * n))
        return group, group

    def update_backward(
        self, grad_z: Tensor, product: Tensor, grad: Tensor, z: Tensor, dropout: Tensor | None
    ) -> None:
        """Compute gradients of product and normalised pair."""
        assert self._update is not None
        totals = self._update_totals
        update_backward(grad_z, product.flatten(1), (grad, z, dropout), self._update, totals, self._scratch)

    def factors_backward(
        self, grad_z: Tensor, grad_factors: Tensor, z: Tensor, mask: Tensor, add: Tensor | None
    ) -> None:
        """Compute the gradient of the pair."""
        assert self._factors is not None
        inputs = (z, unless_ones(mask), add)
        grads = (grad_z, grad_factors.flatten(1))
        factors_backward(*grads, inputs, self._factors, self._factor_totals, self._scratch)

    def norm_backward(self, grad_z: Tensor, z: Tensor) -> Tensor:
        """Replace the gradient of the normalised pair by that of the pair, without factors."""
        assert self._update is not None
        for i in batch_elements(z):
            norm_backward(grad_z[i], z[i], self._update, self._update_totals)
        return grad_z

    def factor_grads(self) -> tuple[Tensor, ...]:
        """Return gradients of the first part's parameters."""
        return factor_gradients(self._factor_totals)

    def update_grads(self) -> tuple[Tensor, ...]:
        """Return gradients of the second part's parameters."""
        return update_gradients(self._update_totals)
