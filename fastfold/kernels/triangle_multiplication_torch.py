"""PyTorch path of triangle multiplication: both halves in blocks of positions, a group of channels between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastfold.kernels import triangle_halves_torch as halves
from fastfold.kernels.blocks import BLOCK_ELEMENTS, Scratch, exact_dtype, without_autocast
from fastfold.kernels.layout import batch_elements
from fastfold.kernels.triangle_contraction import ContractionPlan, contract, contract_backward, multiply


class _TorchHalves:
    """What comes before and after the contraction, in blocks of positions."""

    def __init__(self, parameters: Sequence[Tensor], scratch: Scratch, masked: bool) -> None:
        self._factors = halves.arrange_factors(parameters[:6], scratch.dtype)
        self._update = halves.arrange_update((*parameters[:2], *parameters[6:]), scratch.dtype)
        self._scratch, self._masked = scratch, masked

    def project(self, sides: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """See :class:`~fastfold.kernels.triangle_contraction.Halves`."""
        masks = (mask[..., None],) if self._masked else ()
        weights = halves.of_channels(self._factors, first, count)
        halves.write_factors(sides.flatten(1), z, masks, weights, self._scratch)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """See :class:`~fastfold.kernels.triangle_contraction.Halves`."""
        halves.write_update(out, product.flatten(1), z, residual, dropout, self._update, self._scratch)


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
    both = _TorchHalves(parameters, scratch, bool(halves.unless_ones(mask)))
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
        (halves.arrange_factors(p[:6], exact), halves.arrange_update((*p[:2], *p[6:]), exact))
        for p in (parameters, zeros)
    )
    grad_z = torch.empty_like(z, dtype=exact)
    for i in batch_elements(z):
        scratch, masks = Scratch().of(z, exact), halves.unless_ones(mask[i])
        sides = scratch("sides_of_all", len(factors.sides) // 2, z.shape[-3] * z.shape[-2])
        halves.write_factors(sides, z[i], masks, factors, scratch)
        left, right = sides.chunk(2)
        product = torch.empty_like(left)
        for b_left, b_right, b_product in _channels(left, right, product):
            contract(b_left, b_right, slice(0, z.shape[-2]), outgoing, b_product)
        # Back to the product, whose gradient takes its place, and to LN(z), whose gradient grad_z holds.
        b_dropout = None if dropout is None else dropout[i]
        halves.update_backward(grad_z[i], product, grad[i], z[i], b_dropout, update, update_totals, scratch)
        for b_product, b_left, b_right in _channels(product, left, right):
            contract_backward(b_product, b_left, b_right, outgoing, scratch("product", *b_left.shape))
        del product
        add = grad[i] if add_grad else None
        halves.factors_backward(grad_z[i], sides, z[i], masks, factors, factor_totals, scratch, add)
    return [grad_z, *halves.factor_gradients(factor_totals), *halves.update_gradients(update_totals)[2:]]


def _channels(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Groups of channels of ``[c, N²]`` tensors, as batches of matrices ``[g, N, N]``."""
    n = math.isqrt(tensors[0].shape[1])
    return zip(
        *(x.view(-1, n, n).split(max(1, BLOCK_ELEMENTS // 2 // (n * n))) for x in tensors), strict=True
    )
