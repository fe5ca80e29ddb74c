"""PyTorch path of triangle multiplication: both halves in blocks of positions, a group of channels between them.

Between the two halves the channels come first, ``[c, R, N]`` for R rows of the pair. The backward passes compute
everything again from their inputs, and add to the gradients of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    at_positions,
    block_positions,
    exact_dtype,
    finish,
    normalise,
    normalise_backward,
    position_blocks,
    without_autocast,
)
from fastfold.kernels.ops.triangle_multiplication.contraction import (
    ContractionPlan,
    contract,
    contract_backward,
    multiply,
)

_EPS = 1e-5

Norm = tuple[Tensor, Tensor]
"""Scale and shift of a normalisation, in an exact dtype, or their gradients."""


class FactorWeights(NamedTuple):
    """Parameters of the first half as its passes use them, or their gradients.

    The rows of ``sides [4 c, c_z]`` are projection and gate of ``left``, then projection and gate of ``right``.
    """

    norm: Norm
    sides: Tensor
    sides_bias: Tensor


class UpdateWeights(NamedTuple):
    """Parameters of the second half, or their gradients; ``norm`` is that of the pair, as in the first."""

    norm: Norm
    norm_out: Norm
    out: Tensor
    out_bias: Tensor
    gate: Tensor
    gate_bias: Tensor


def arrange_factors(parameters: Sequence[Tensor], dtype: torch.dtype) -> FactorWeights:
    """Norm, projection and gate, weight before bias each; the parameters of the norm in an exact dtype."""
    norm, norm_bias, proj, proj_bias, gate, gate_bias = parameters
    exact = torch.promote_types(dtype, torch.float32)

    def interleave(projection: Tensor, gate: Tensor) -> Tensor:
        sides = torch.stack([projection.unflatten(0, (2, -1)), gate.unflatten(0, (2, -1))], 1)
        return sides.flatten(0, 2).to(dtype)

    return FactorWeights(
        (norm.to(exact), norm_bias.to(exact)),
        interleave(proj, gate),
        interleave(proj_bias[:, None], gate_bias[:, None]),
    )


def factor_gradients(grads: FactorWeights) -> tuple[Tensor, ...]:
    """Inverse of :func:`arrange_factors`."""
    projection, gate = (x.flatten(0, 1) for x in grads.sides.unflatten(0, (2, 2, -1)).unbind(1))
    projection_bias, gate_bias = (x.flatten() for x in grads.sides_bias.unflatten(0, (2, 2, -1)).unbind(1))
    return *grads.norm, projection, projection_bias, gate, gate_bias


def arrange_update(parameters: Sequence[Tensor], dtype: torch.dtype) -> UpdateWeights:
    """Both norms, output projection and gate, weight before bias each; the norms in an exact dtype."""
    exact = torch.promote_types(dtype, torch.float32)
    norm, norm_bias, norm_out, norm_out_bias = (x.to(exact) for x in parameters[:4])
    return UpdateWeights((norm, norm_bias), (norm_out, norm_out_bias), *(x.to(dtype) for x in parameters[4:]))


def update_gradients(grads: UpdateWeights) -> tuple[Tensor, ...]:
    """Inverse of :func:`arrange_update`."""
    return *grads.norm, *grads.norm_out, *grads[2:]


def of_channels(weights: FactorWeights, first: int, count: int) -> FactorWeights:
    """Parameters of some of the hidden channels alone."""
    c = len(weights.sides) // 4
    if count == c:
        return weights

    def chosen(x: Tensor) -> Tensor:
        return x.unflatten(0, (4, c))[:, first : first + count].flatten(0, 1)

    return weights._replace(sides=chosen(weights.sides), sides_bias=chosen(weights.sides_bias))


def unless_ones(mask: Tensor) -> tuple[Tensor, ...]:
    """``mask [R, N]`` as ``[R, N, 1]``, or nothing if it multiplies by one everywhere."""
    return () if bool((mask == 1).all()) else (mask[..., None],)


def write_factors(
    sides: Tensor, z: Tensor, masks: tuple[Tensor, ...], weights: FactorWeights, scratch: Scratch
) -> None:
    """Fill ``sides [2 c, R N]`` with both factors of the contraction, gated and masked."""
    for columns, (b_z, *b_mask) in _blocks(len(weights.sides), z, *masks):
        b_x, _ = _normalise(b_z, weights.norm, scratch.dtype)
        for side, b_sides in zip(sides.chunk(2), _sides(b_x, weights, scratch), strict=True):
            torch.ops.aten.glu(b_sides, 0, out=side[:, columns])
            for factor in b_mask:
                side[:, columns].mul_(factor.t())


def factors_backward(
    grad_z: Tensor,
    grad_sides: Tensor,
    z: Tensor,
    masks: tuple[Tensor, ...],
    weights: FactorWeights,
    totals: FactorWeights,
    scratch: Scratch,
    add: Tensor | None,
) -> None:
    """Turn ``grad_z``, which holds other shares of the gradient of the normalised ``z``, into the gradient of ``z``.

    Args:
        grad_z: ``[R, N, c_z]``, in the dtype of the weights.
        grad_sides: ``[2 c, R N]``, gradient of the factors; overwritten.
        z: ``[R, N, c_z]``.
        masks: See :func:`unless_ones`.
        weights: In an exact dtype.
        totals: What the gradients of the parameters are added to.
        scratch: Buffers of the dtype of the weights.
        add: ``[R, N, c_z]`` to add to the gradient, or None.
    """
    adds = () if add is None else (add,)
    for columns, (b_z, b_grad_x, *rest) in _blocks(len(weights.sides), z, grad_z, *adds, *masks):
        b_add, b_mask = (None, rest) if add is None else (rest[0], rest[1:])
        b_z = b_z.to(weights.sides.dtype)
        b_x, statistics = _normalise(b_z, weights.norm, scratch.dtype)
        b_grad_sides = scratch("grad_sides", len(weights.sides), len(b_x))
        b_sides = _sides(b_x, weights, scratch)
        for side, b_pre, b_out in zip(grad_sides.chunk(2), b_sides, b_grad_sides.chunk(2), strict=True):
            for factor in b_mask:
                side[:, columns].mul_(factor.t())
            torch.ops.aten.glu_backward(side[:, columns], b_pre, 0, grad_input=b_out)
        totals.sides.addmm_(b_grad_sides, b_x)
        totals.sides_bias.add_(b_grad_sides.sum(1, keepdim=True))
        b_grad_x.addmm_(b_grad_sides.t(), weights.sides)
        b_result = normalise_backward(b_grad_x, b_z, statistics, *weights.norm, *totals.norm)
        finish(b_grad_x, b_result, b_add, None)


def write_update(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    weights: UpdateWeights,
    scratch: Scratch,
) -> None:
    """Fill ``out [R, N, c_z]``, which may be ``z`` or ``residual``, from ``product [c, R N]``."""
    residuals = () if residual is None else (residual,)
    for columns, (b_z, b_out, *b_residual) in _blocks(_widest(weights), z, out, *residuals):
        b_x, _ = _normalise(b_z, weights.norm, scratch.dtype)
        b_product, _ = _normalise(product[:, columns].t(), weights.norm_out, scratch.dtype)
        b_update = scratch("update", *b_out.shape)
        torch.ops.aten.glu(_output(b_x, b_product, weights, scratch), -1, out=b_update)
        b_dropout = None if dropout is None else at_positions(dropout, columns)
        finish(b_out, b_update, b_residual[0] if b_residual else None, b_dropout)


def update_backward(
    grad_x: Tensor,
    product: Tensor,
    grad: Tensor,
    z: Tensor,
    dropout: Tensor | None,
    weights: UpdateWeights,
    totals: UpdateWeights,
    scratch: Scratch,
) -> None:
    """Put the gradient of ``product [c, R N]`` in its place, and that of the normalised ``z`` into ``grad_x``.

    Args:
        grad_x: ``[R, N, c_z]``, in the dtype of the weights.
        product: What the second normalisation gets, in the same dtype.
        grad: Gradient of the update ``[R, N, c_z]``.
        z: ``[R, N, c_z]``.
        dropout: Factors in the shape of ``z``, or None.
        weights: In an exact dtype.
        totals: What the gradients of the parameters are added to, but for those of the norm of ``z``.
        scratch: Buffers of the dtype of the weights.
    """
    for columns, (b_z, b_grad, b_grad_x) in _blocks(_widest(weights), z, grad, grad_x):
        b_grad = scratch.copy("grad", b_grad)
        if dropout is not None:
            b_grad.mul_(at_positions(dropout, columns))
        b_x, _ = _normalise(b_z, weights.norm, scratch.dtype)
        b_product = scratch.copy("columns", product[:, columns].t())
        b_normed, statistics = _normalise(b_product, weights.norm_out, scratch.dtype)
        b_output = _output(b_x, b_normed, weights, scratch)
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


def norm_backward(grad_x: Tensor, z: Tensor, weights: UpdateWeights, totals: UpdateWeights) -> None:
    """Turn ``grad_x [R, N, c_z]``, the gradient of the normalised ``z``, into that of ``z``."""
    for _, (b_z, b_grad_x) in _blocks(_widest(weights), z, grad_x):
        b_z = b_z.to(weights.out.dtype)
        _, statistics = _normalise(b_z, weights.norm, b_z.dtype)
        b_grad_x.copy_(normalise_backward(b_grad_x, b_z, statistics, *weights.norm, *totals.norm))


def _widest(weights: UpdateWeights) -> int:
    """Channels of all that a block makes of a position."""
    return 4 * max(weights.out.shape)


def _blocks(channels: int, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Blocks of positions of ``[R, N, *]`` tensors, with their columns in a ``[c, R N]`` one."""
    start = 0
    for parts in position_blocks(block_positions(channels), *tensors):
        yield slice(start, start + len(parts[0])), parts
        start += len(parts[0])


def _normalise(x: Tensor, parameters: Norm, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Normalised block in ``dtype`` and its statistics."""
    out, *statistics = normalise(x.to(parameters[0].dtype), *parameters, _EPS)
    return out.to(dtype), (statistics[0], statistics[1])


def _sides(b_x: Tensor, weights: FactorWeights, scratch: Scratch) -> tuple[Tensor, ...]:
    """Projection and gate logits ``[2 c, n]`` of ``left``, and of ``right``."""
    out = scratch("sides", len(weights.sides), len(b_x))
    return torch.addmm(weights.sides_bias, weights.sides, b_x.t(), out=out).chunk(2)


def _output(b_x: Tensor, b_product: Tensor, weights: UpdateWeights, scratch: Scratch) -> Tensor:
    """Output projection and output gate logits ``[n, 2 c_z]``."""
    c_z = len(weights.out)
    out = scratch("output", len(b_x), 2 * c_z)
    torch.addmm(weights.out_bias, b_product, weights.out.t(), out=out[:, :c_z])
    torch.addmm(weights.gate_bias, b_x, weights.gate.t(), out=out[:, c_z:])
    return out


class _TorchHalves:
    """What comes before and after the contraction, in blocks of positions."""

    def __init__(self, parameters: Sequence[Tensor], scratch: Scratch, masked: bool) -> None:
        self._factors = arrange_factors(parameters[:6], scratch.dtype)
        self._update = arrange_update((*parameters[:2], *parameters[6:]), scratch.dtype)
        self._scratch, self._masked = scratch, masked

    def project(self, sides: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """See :class:`~fastfold.kernels.ops.triangle_multiplication.contraction.Halves`."""
        masks = (mask[..., None],) if self._masked else ()
        weights = of_channels(self._factors, first, count)
        write_factors(sides.flatten(1), z, masks, weights, self._scratch)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """See :class:`~fastfold.kernels.ops.triangle_multiplication.contraction.Halves`."""
        write_update(out, product.flatten(1), z, residual, dropout, self._update, self._scratch)


@without_autocast
def forward(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    outgoing: bool,
    parameters: Sequence[Tensor],
    residual: Tensor | None,
    dropout: Tensor | None,
    scratch: Scratch,
    plan: ContractionPlan,
) -> None:
    """Fill ``out``; ``dropout`` has the shape of ``z``."""
    scratch = scratch.of(z)
    c = parameters[8].shape[1]
    channels = min(c, plan.channels or max(1, c // 4))
    both = _TorchHalves(parameters, scratch, bool(unless_ones(mask)))
    multiply(out, z, mask, outgoing, c, channels, both, residual, dropout, scratch, plan.host)


@without_autocast
def backward(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    outgoing: bool,
    add_grad: bool,
) -> list[Tensor]:
    """Gradients of ``z`` and the parameters, in an exact dtype; everything is recomputed from the inputs."""
    exact = exact_dtype(z)
    zeros = [torch.zeros_like(p, dtype=exact) for p in parameters]
    (factors, update), (factor_totals, update_totals) = (
        (arrange_factors(p[:6], exact), arrange_update((*p[:2], *p[6:]), exact)) for p in (parameters, zeros)
    )
    grad_z = torch.empty_like(z, dtype=exact)
    for i in batch_elements(z):
        scratch, masks = Scratch().of(z, exact), unless_ones(mask[i])
        sides = scratch("sides_of_all", len(factors.sides) // 2, z.shape[-3] * z.shape[-2])
        write_factors(sides, z[i], masks, factors, scratch)
        left, right = sides.chunk(2)
        product = torch.empty_like(left)
        for b_left, b_right, b_product in _channels(left, right, product):
            contract(b_left, b_right, slice(0, z.shape[-2]), outgoing, b_product)
        # Back to the product, whose gradient takes its place, and to LN(z), whose gradient grad_z holds.
        b_dropout = None if dropout is None else dropout[i]
        update_backward(grad_z[i], product, grad[i], z[i], b_dropout, update, update_totals, scratch)
        for b_product, b_left, b_right in _channels(product, left, right):
            contract_backward(b_product, b_left, b_right, outgoing, scratch("product", *b_left.shape))
        del product
        add = grad[i] if add_grad else None
        factors_backward(grad_z[i], sides, z[i], masks, factors, factor_totals, scratch, add)
    return [grad_z, *factor_gradients(factor_totals), *update_gradients(update_totals)[2:]]


def _channels(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Groups of channels of ``[c, N²]`` tensors, as batches of matrices ``[g, N, N]``."""
    n = math.isqrt(tensors[0].shape[1])
    return zip(
        *(x.view(-1, n, n).split(max(1, BLOCK_ELEMENTS // 2 // (n * n))) for x in tensors), strict=True
    )
