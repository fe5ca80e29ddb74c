"""Triangle multiplication in Triton: two kernels around a batch of matrix products, and their gradients.

Factors and product are ``[c, W, W]``, and W is N padded with zeros. Backward, one kernel of each half owns positions
and computes gradients of activations, and another owns rows of the weights and computes theirs; all recompute
projections and gates. The order of sums over positions depends only on sizes.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
from torch import Tensor

from fastfold.kernels.common.layout import SMALL_PRODUCT, padded_width
from fastfold.kernels.common.parameters import Totals, in_dtype
from fastfold.kernels.common.scratch import Scratch, share_of
from fastfold.kernels.ops.layer_norm.triton_bwd import layer_norm_backward
from fastfold.kernels.ops.triangle_multiplication import triton_tiles
from fastfold.kernels.ops.triangle_multiplication.params import (
    EPS,
    FACTOR_LAYERS,
    UPDATE_LAYERS,
    FactorParams,
    UpdateParams,
)
from fastfold.kernels.ops.triangle_multiplication.triton_factors import (
    project,
    projection_backward,
    projection_weights_backward,
)
from fastfold.kernels.ops.triangle_multiplication.triton_update import (
    output_backward,
    output_weights_backward,
    write_update,
)


def channel_group(c: int, positions: int) -> int:
    """Return the channels whose factors exist at a time: half, or a quarter for a large pair."""
    return max(1, triton.cdiv(c, 2 if c * positions < 2**27 else 4))


class TritonTriangleForward:
    """Kernels before and after the contraction, with contiguous weights in the dtypes that they read.

    Otherwise it is :class:`fastfold.kernels.ops.triangle_multiplication.eager.TriangleForward`.
    """

    split = False

    def __init__(
        self, factors: FactorParams | None, update: UpdateParams | None, scratch: Scratch, summands: int = 1
    ) -> None:
        self.dtype, self.share = scratch.dtype, share_of(summands, scratch.dtype)
        self._factors = None if factors is None else in_dtype(factors, scratch.dtype)
        self._update = None if update is None else in_dtype(update, scratch.dtype)

    def width(self, n: int) -> int:
        """Return N padded to a width at which matrix products and kernels are fast."""
        return padded_width(n)

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """Compute the factors of some channels."""
        assert self._factors is not None
        if not self.split and triton_tiles.serves(z, len(projections), projections.shape[-1]):
            triton_tiles.project_tiles(projections, z, mask, self._factors, first, count)
        else:
            project(projections, z, mask, self._factors, first, count, split=self.split)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """Compute the result."""
        assert self._update is not None
        if triton_tiles.serves_update(out, product, z, residual):
            triton_tiles.write_update_tiles(out, product, z, self._update, residual, dropout)
        else:
            write_update(out, product, z, self._update, residual, dropout, self.share)


class TritonTriangleGradients(TritonTriangleForward):
    """Kernels of the gradients; a kernel runs only if its result is needed.

    Otherwise it is :class:`fastfold.kernels.ops.triangle_multiplication.eager.TriangleGradients`.

    With fewer than 32 channels, rows of the second normalisation have so little variance that factors and product are
    kept in float32. In bfloat16, factors and gradients of the product are computed with a second product for the part
    that rounding removes from the rows. Gradients of weights and of the first half don't need it, nor does float16.
    Errors with and without are in ``benchmarks/results/choices.md``.
    """

    def __init__(
        self,
        factors: FactorParams | None,
        update: UpdateParams | None,
        z: Tensor,
        needed: Collection[str],
        summands: int = 1,
    ) -> None:
        super().__init__(factors, update, Scratch().of(z))
        self.split = z.dtype == torch.bfloat16
        self._needed, self.channels = frozenset(needed), 0
        self._factor_totals, self._update_totals = Totals(), Totals()
        if factors is not None:
            self.channels = factors.proj_weight.shape[0] // 2
        if update is not None:
            self.channels = update.out_weight.shape[1]
        self.dtype = torch.float32 if self.channels < 32 else z.dtype
        self.share = share_of(summands, self.dtype)

    def contraction_groups(self, n: int) -> tuple[int, int]:
        """Return numbers of channels: all for the contraction, and an eighth for gradients."""
        # Gradients of a small product take all channels too.
        few = self.channels * n * n < SMALL_PRODUCT
        return max(1, self.channels), max(1, self.channels if few else triton.cdiv(self.channels, 8))

    def update_backward(
        self, grad_z: Tensor, product: Tensor, grad: Tensor, z: Tensor, dropout: Tensor | None
    ) -> None:
        """Compute gradients of product and normalised pair."""
        assert self._update is not None
        totals, weights = self._update_totals, self._update
        if not self._needed.isdisjoint(UPDATE_LAYERS):  # before the gradient of the product takes its place
            shares = output_weights_backward(product, z, grad, dropout, weights, self.share)
            totals.add(**dict(zip(UPDATE_LAYERS, shares, strict=True)))
        weight, bias = output_backward(product, z, grad, grad_z, dropout, weights, self.share)
        totals.add(norm_out_weight=weight, norm_out_bias=bias)

    def factors_backward(
        self, grad_z: Tensor, grad_factors: Tensor, z: Tensor, mask: Tensor, add: Tensor | None
    ) -> None:
        """Compute the gradient of the pair."""
        assert self._factors is not None
        totals, weights = self._factor_totals, self._factors
        if not self._needed.isdisjoint(FACTOR_LAYERS):
            shares = projection_weights_backward(grad_factors, z, mask, weights)
            totals.add(**dict(zip(FACTOR_LAYERS, shares, strict=True)))
        weight, bias = projection_backward(grad_factors, z, mask, add, grad_z, weights)
        totals.add(norm_weight=weight, norm_bias=bias)

    def norm_backward(self, grad_z: Tensor, z: Tensor) -> Tensor:
        """Compute the gradient of the pair without factors."""
        assert self._update is not None
        grad_x, weight, bias = layer_norm_backward(grad_z, z, self._update.norm_weight, EPS)
        assert grad_x is not None
        assert weight is not None
        assert bias is not None
        self._update_totals.add(norm_weight=weight, norm_bias=bias)
        return grad_x

    def factor_grads(self) -> list[Tensor | None]:
        """Return gradients of the first part's parameters."""
        assert self._factors is not None
        return self._factor_totals.of(self._factors, self._needed | {"norm_weight", "norm_bias"})

    def update_grads(self) -> list[Tensor | None]:
        """Return gradients of the second part's parameters."""
        assert self._update is not None
        return self._update_totals.of(self._update, self._needed)


forward_steps, gradient_steps = TritonTriangleForward, TritonTriangleGradients
"""Names of the classes by which :mod:`~.passes` finds them in the module of a backend."""
