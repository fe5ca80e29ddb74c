"""PyTorch path of triangle multiplication, in blocks of positions between which the channels come first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.blocks import (
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
from fastfold.kernels.triangle_contraction import ContractionPlan, contract, contract_backward, multiply

_EPS = 1e-5


class _Weights(NamedTuple):
    """Parameters as the passes use them, or their gradients.

    The rows of ``sides [4 c, c_z]`` are projection and gate of ``left``, then projection and gate of ``right``.
    """

    norm_in: tuple[Tensor, Tensor]
    sides: Tensor
    sides_bias: Tensor
    norm_out: tuple[Tensor, Tensor]
    out: Tensor
    out_bias: Tensor
    gate: Tensor
    gate_bias: Tensor


def _arrange(parameters: Sequence[Tensor], dtype: torch.dtype) -> _Weights:
    """Parameters in the order of the public function; those of the norms in an exact dtype."""
    *norm_in, proj, proj_bias, gate, gate_bias, norm_out, norm_out_bias = parameters[:8]
    exact = torch.promote_types(dtype, torch.float32)

    def interleave(projection: Tensor, gate: Tensor) -> Tensor:
        return (
            torch.stack([projection.unflatten(0, (2, -1)), gate.unflatten(0, (2, -1))], 1)
            .flatten(0, 2)
            .to(dtype)
        )

    return _Weights(
        (norm_in[0].to(exact), norm_in[1].to(exact)),
        interleave(proj, gate),
        interleave(proj_bias[:, None], gate_bias[:, None]),
        (norm_out.to(exact), norm_out_bias.to(exact)),
        *(x.to(dtype) for x in parameters[8:]),
    )


def _rearrange(grads: _Weights) -> tuple[Tensor, ...]:
    """Inverse of :func:`_arrange`."""
    projection, gate = (x.flatten(0, 1) for x in grads.sides.unflatten(0, (2, 2, -1)).unbind(1))
    projection_bias, gate_bias = (x.flatten() for x in grads.sides_bias.unflatten(0, (2, 2, -1)).unbind(1))
    return *grads.norm_in, projection, projection_bias, gate, gate_bias, *grads.norm_out, *grads[4:]


class _TorchHalves:
    """What comes before and after the contraction, in blocks of positions."""

    def __init__(self, weights: _Weights, scratch: Scratch, masked: bool) -> None:
        self._weights, self._scratch, self._masked = weights, scratch, masked

    def project(self, sides: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """See :class:`~fastfold.kernels.triangle_contraction.Halves`."""
        masks = (mask[..., None],) if self._masked else ()
        _project(sides.flatten(1), z, masks, _of_channels(self._weights, first, count), self._scratch)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """See :class:`~fastfold.kernels.triangle_contraction.Halves`."""
        weights, scratch, flat = self._weights, self._scratch, product.flatten(1)
        residuals = () if residual is None else (residual,)
        for columns, (b_z, b_out, *b_residual) in _blocks(weights, z, out, *residuals):
            b_x, _ = _normalise(b_z, weights.norm_in, scratch.dtype)
            b_product, _ = _normalise(flat[:, columns].t(), weights.norm_out, scratch.dtype)
            b_update = scratch("update", *b_out.shape)
            torch.ops.aten.glu(_output(b_x, b_product, weights, scratch), -1, out=b_update)
            b_dropout = None if dropout is None else at_positions(dropout, columns)
            finish(b_out, b_update, b_residual[0] if b_residual else None, b_dropout)


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
    weights, scratch = _arrange(parameters, z.dtype), scratch.of(z)
    c = len(weights.sides) // 4
    channels = min(c, plan.channels or max(1, c // 4))
    halves = _TorchHalves(weights, scratch, bool(_unless_ones(mask)))
    multiply(out, z, mask, outgoing, c, channels, halves, residual, dropout, scratch, plan.host)


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
    weights = _arrange(parameters, exact)
    totals = _arrange([torch.zeros_like(p, dtype=exact) for p in parameters], exact)
    grad_z = torch.empty_like(z, dtype=exact)
    for i in itertools.product(*map(range, z.shape[:-3] if z.numel() else (0,))):
        factors = None if dropout is None else dropout[i]
        _backward(grad_z[i], grad[i], z[i], mask[i], factors, weights, totals, outgoing, add_grad)
    return [grad_z, *_rearrange(totals)]


def _blocks(weights: _Weights, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Blocks of positions of ``[N, N, *]`` tensors, with their columns in a ``[c, N²]`` one."""
    start = 0
    for parts in position_blocks(block_positions(len(weights.sides)), *tensors):
        yield slice(start, start + len(parts[0])), parts
        start += len(parts[0])


def _normalise(
    x: Tensor, parameters: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Normalised block in ``dtype`` and its statistics."""
    out, *statistics = normalise(x.to(parameters[0].dtype), *parameters, _EPS)
    return out.to(dtype), (statistics[0], statistics[1])


def _unless_ones(mask: Tensor) -> tuple[Tensor, ...]:
    """``mask [N, N]`` as ``[N, N, 1]``, or nothing if it multiplies by one everywhere."""
    return () if bool((mask == 1).all()) else (mask[..., None],)


def _sides(b_x: Tensor, weights: _Weights, scratch: Scratch) -> tuple[Tensor, ...]:
    """Projection and gate logits ``[2 c, n]`` of ``left``, and of ``right``."""
    out = scratch("sides", len(weights.sides), len(b_x))
    return torch.addmm(weights.sides_bias, weights.sides, b_x.t(), out=out).chunk(2)


def _output(b_x: Tensor, b_product: Tensor, weights: _Weights, scratch: Scratch) -> Tensor:
    """Output projection and output gate logits ``[n, 2 c_z]``."""
    c_z = len(weights.out)
    out = scratch("output", len(b_x), 2 * c_z)
    torch.addmm(weights.out_bias, b_product, weights.out.t(), out=out[:, :c_z])
    torch.addmm(weights.gate_bias, b_x, weights.gate.t(), out=out[:, c_z:])
    return out


def _of_channels(weights: _Weights, first: int, count: int) -> _Weights:
    """Parameters with the projections of some of the hidden channels alone."""
    c = len(weights.sides) // 4
    if count == c:
        return weights

    def chosen(x: Tensor) -> Tensor:
        return x.unflatten(0, (4, c))[:, first : first + count].flatten(0, 1)

    return weights._replace(sides=chosen(weights.sides), sides_bias=chosen(weights.sides_bias))


def _project(
    sides: Tensor, z: Tensor, masks: tuple[Tensor, ...], weights: _Weights, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Fill ``sides [2 c, N²]`` with both factors of the contraction, gated and masked, and return them."""
    left, right = sides.chunk(2)
    for columns, (b_z, *b_mask) in _blocks(weights, z, *masks):
        b_x, _ = _normalise(b_z, weights.norm_in, scratch.dtype)
        for side, b_sides in zip((left, right), _sides(b_x, weights, scratch), strict=True):
            torch.ops.aten.glu(b_sides, 0, out=side[:, columns])
            for factor in b_mask:
                side[:, columns].mul_(factor.t())
    return left, right


def _channels(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Groups of channels of ``[c, N²]`` tensors, as batches of matrices ``[g, N, N]``."""
    n = math.isqrt(tensors[0].shape[1])
    return zip(
        *(x.view(-1, n, n).split(max(1, BLOCK_ELEMENTS // 2 // (n * n))) for x in tensors), strict=True
    )


def _backward(
    grad_z: Tensor,
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    dropout: Tensor | None,
    weights: _Weights,
    totals: _Weights,
    outgoing: bool,
    add_grad: bool,
) -> None:
    """Fill ``grad_z`` of one batch element, and add its share of the parameters' gradients to ``totals``."""
    exact = weights.sides.dtype
    scratch = Scratch().of(z, exact)
    sides = scratch("sides_of_all", len(weights.sides) // 2, z.shape[0] * z.shape[1])
    left, right = _project(sides, z, _unless_ones(mask), weights, scratch)
    product = torch.empty_like(left)
    for b_left, b_right, b_product in _channels(left, right, product):
        contract(b_left, b_right, slice(0, len(z)), outgoing, b_product)
    # From the update back to the product, whose gradient takes its place, and to LN(z), whose gradient grad_z holds.
    for columns, (b_z, b_grad, b_grad_x) in _blocks(weights, z, grad, grad_z):
        b_grad = scratch.copy("grad", b_grad)
        if dropout is not None:
            b_grad.mul_(at_positions(dropout, columns))
        b_x, _ = _normalise(b_z, weights.norm_in, exact)
        b_product = scratch.copy("columns", product[:, columns].t())
        b_normed, statistics = _normalise(b_product, weights.norm_out, exact)
        b_output = _output(b_x, b_normed, weights, scratch)
        b_grad_output = scratch("grad_output", *b_output.shape)
        torch.ops.aten.glu_backward(b_grad, b_output, -1, grad_input=b_grad_output)
        b_grad_out, b_grad_gate = b_grad_output.chunk(2, -1)
        totals.out.addmm_(b_grad_out.t(), b_normed)
        totals.gate.addmm_(b_grad_gate.t(), b_x)
        for total, part in zip(
            (totals.out_bias, totals.gate_bias), b_grad_output.sum(0).chunk(2), strict=True
        ):
            total += part
        torch.mm(b_grad_gate, weights.gate, out=b_grad_x)
        b_grad_normed = torch.mm(b_grad_out, weights.out, out=scratch("grad_normed", *b_product.shape))
        b_grad_product = normalise_backward(
            b_grad_normed, b_product, statistics, *weights.norm_out, *totals.norm_out
        )
        product[:, columns] = b_grad_product.t()
    for b_product, b_left, b_right in _channels(product, left, right):
        contract_backward(b_product, b_left, b_right, outgoing, scratch("product", *b_left.shape))
    del product
    for columns, (b_z, b_total, b_grad_x, *b_mask) in _blocks(weights, z, grad, grad_z, *_unless_ones(mask)):
        b_z = b_z.to(exact)
        b_x, statistics = _normalise(b_z, weights.norm_in, exact)
        b_grad_sides = scratch("grad_sides", len(weights.sides), len(b_x))
        b_sides = _sides(b_x, weights, scratch)
        for b_grad, b_pre, b_out in zip((left, right), b_sides, b_grad_sides.chunk(2), strict=True):
            for factor in b_mask:
                b_grad[:, columns].mul_(factor.t())
            torch.ops.aten.glu_backward(b_grad[:, columns], b_pre, 0, grad_input=b_out)
        totals.sides.addmm_(b_grad_sides, b_x)
        totals.sides_bias.add_(b_grad_sides.sum(1, keepdim=True))
        b_grad_x.addmm_(b_grad_sides.t(), weights.sides)
        b_result = normalise_backward(b_grad_x, b_z, statistics, *weights.norm_in, *totals.norm_in)
        finish(b_grad_x, b_result, b_total if add_grad else None, None)
