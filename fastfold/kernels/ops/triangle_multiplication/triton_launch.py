"""Triangle multiplication in Triton: two kernels around a batch of matrix products, and their gradients.

Between the kernels the channels come first, ``[c, N, N]``, so that the contraction is a batch of plain matrix products.
Backward, one kernel of each half owns positions and gives the gradients of activations, and another owns rows of the
weights and gives theirs; all recompute projections and gates. Sums over positions are made in an order that depends
on sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fastfold.kernels.common.kernel_variant import Specimen
from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.normalised_rows import specimens_of
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.ops.layer_norm.triton_bwd import layer_norm_backward
from fastfold.kernels.ops.triangle_multiplication import (
    triton_factors_bwd,
    triton_factors_fwd,
    triton_update_bwd,
    triton_update_fwd,
)
from fastfold.kernels.ops.triangle_multiplication.contraction import (
    ContractionPlan,
    contract,
    contract_backward,
    multiply,
)
from fastfold.kernels.ops.triangle_multiplication.triton_factors_bwd import (
    projection_backward,
    projection_weights_backward,
)
from fastfold.kernels.ops.triangle_multiplication.triton_factors_fwd import EPS, project
from fastfold.kernels.ops.triangle_multiplication.triton_update_bwd import (
    output_backward,
    output_weights_backward,
)
from fastfold.kernels.ops.triangle_multiplication.triton_update_fwd import write_update


def arranged(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Contiguous parameters in the order of the public function: those of the norms in float32."""
    norms = (0, 1, 6, 7)
    return [p.to(torch.float32 if i in norms else dtype).contiguous() for i, p in enumerate(parameters)]


def channel_group(c: int, positions: int) -> int:
    """Channels whose two factors exist at a time: half of them, or a quarter where a pair tensor is large."""
    return max(1, triton.cdiv(c, 2 if c * positions < 2**27 else 4))


def backward_dtype(z: Tensor, c: int) -> torch.dtype:
    """What factors, product and their gradients are kept in between the kernels of the backward pass.

    Of 8 or 16 channels the second normalisation makes rows of so little variance that rounding them to bfloat16 would
    change gradients by up to 1%; from 32 channels on it is 0.45% at most, measured over random inputs.
    """
    return torch.float32 if c < 32 else z.dtype


class _TritonHalves:
    """The two kernels around the contraction."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def project(self, sides: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """See :class:`~fastfold.kernels.ops.triangle_multiplication.contraction.Halves`."""
        project(sides, z, mask, self._parameters, first, count)

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """See :class:`~fastfold.kernels.ops.triangle_multiplication.contraction.Halves`."""
        write_update(out, product, z, self._parameters, residual, dropout)


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
    """Fill ``out``, which may be ``z`` or ``residual``; ``dropout`` has the shape of ``z``."""
    c = parameters[8].shape[1]
    channels = min(c, plan.channels or channel_group(c, z.shape[-2] ** 2))
    halves = _TritonHalves(arranged(parameters, z.dtype))
    multiply(out, z, mask, outgoing, c, channels, halves, residual, dropout, scratch.of(z), plan.host)


def backward(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    outgoing: bool,
    add_grad: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of ``z`` and of the parameters, in its dtype or float32; ``dropout`` has the shape of ``z``.

    Beside the result there are three tensors ``[c, N, N]`` of one batch element, and an eighth of one.
    """
    n, c = z.shape[-2], parameters[8].shape[1]
    parameters = arranged(parameters, z.dtype)
    between = backward_dtype(z, c)
    grad_z = torch.empty_like(z, dtype=between)
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    need_first, need_last = any(needs[3:7]), any(needs[9:])

    for i in batch_elements(z):
        sides, product = (z.new_empty(k, n, n, dtype=between) for k in (2 * c, c))
        project(sides, z[i], mask[i], parameters, 0, c, split=z.dtype != torch.float32)
        left, right = sides[:c], sides[c:]
        contract(left, right, slice(0, n), outgoing, product)
        b_dropout = None if dropout is None else dropout[i]
        if need_last:  # before the gradient of the product takes its place
            _add(totals[8:], output_weights_backward(product, z[i], grad[i], b_dropout, parameters))
        _add(totals[6:8], output_backward(product, z[i], grad[i], grad_z[i], b_dropout, parameters))
        group = triton.cdiv(c, 8)
        buffer = torch.empty_like(left[:group])
        for b_grad, b_left, b_right in zip(*(x.split(group) for x in (product, left, right)), strict=True):
            contract_backward(b_grad, b_left, b_right, outgoing, buffer[: len(b_grad)])
        del product, buffer
        if need_first:
            _add(totals[2:6], projection_weights_backward(sides, z[i], mask[i], parameters))
        _add(totals[:2], projection_backward(sides, z[i], mask[i], grad[i], grad_z[i], parameters, add_grad))
    return [grad_z, *totals]


def write_factors(sides: Tensor, z: Tensor, mask: Tensor, parameters: Sequence[Tensor]) -> None:
    """Fill ``sides [*, 2 c, R, N]`` from ``z [*, R, N, c_z]`` and the first six parameters."""
    parameters = arranged(parameters, z.dtype)
    for i in batch_elements(z):
        project(sides[i], z[i], mask[i], parameters, 0, sides.shape[-3] // 2)


def factors_backward(
    grad_sides: Tensor, z: Tensor, mask: Tensor, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of ``z`` and of the first six parameters, from those of the factors ``[*, 2 c, R, N]``."""
    parameters = arranged(parameters, z.dtype)
    grad_z = torch.zeros_like(z, dtype=backward_dtype(z, grad_sides.shape[-3] // 2))
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for i in batch_elements(z):
        weights = projection_weights_backward(grad_sides[i], z[i], mask[i], parameters)
        # The result's gradient is not added, so that any tensor stands for it.
        norm = projection_backward(grad_sides[i], z[i], mask[i], z[i], grad_z[i], parameters, False)
        _add(totals, [*norm, *weights])
    return [grad_z, *totals]


def write_updates(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
) -> None:
    """Fill ``out [*, R, N, c_z]`` from ``product [*, c, R, N]``, the norm of ``z`` and the last six parameters."""
    every = _without_projection(parameters, z.dtype)
    for i in batch_elements(z):
        rest = [None if x is None else x[i] for x in (residual, dropout)]
        write_update(out[i], product[i], z[i], every, *rest)


def update_backward(
    grad: Tensor, product: Tensor, z: Tensor, dropout: Tensor | None, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of product, ``z`` and the parameters of :func:`write_updates`."""
    every, between = _without_projection(parameters, z.dtype), backward_dtype(z, product.shape[-3])
    grad_product = product.to(between, copy=True, memory_format=torch.contiguous_format)
    grad_x = torch.empty(z.shape, dtype=between, device=z.device)
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in parameters[2:]]
    for i in batch_elements(z):
        b_dropout = None if dropout is None else dropout[i]
        # Before the gradient of the product takes its place.
        weights = output_weights_backward(grad_product[i], z[i], grad[i], b_dropout, every)
        norm = output_backward(grad_product[i], z[i], grad[i], grad_x[i], b_dropout, every)
        _add(totals, [*norm, *weights])
    normed = layer_norm_backward(grad_x, z, every[0], EPS, (True, True, True))
    return [grad_product, *(x for x in normed if x is not None), *totals]


def _without_projection(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All arranged parameters from those of the second half, whose kernels leave the third to sixth alone."""
    return arranged((*parameters[:2], *parameters[:2], *parameters[:2], *parameters[2:]), dtype)


def _add(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part


def specimens() -> list[Specimen]:
    """Every kernel in every dtype and configuration that ships."""
    return specimens_of(
        triton_factors_fwd.kernels()
        | triton_update_fwd.kernels()
        | triton_update_bwd.kernels()
        | triton_factors_bwd.kernels()
    )
