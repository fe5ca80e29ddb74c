"""Arrangement of parameters, and of their gradients, in the PyTorch path of triangle multiplication."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, UpdateParams

Norm = tuple[Tensor, Tensor]  #: Scale and shift of a normalisation, in an exact dtype, or their gradients


class FactorWeights(NamedTuple):
    """Parameters of the first half as its passes use them, or their gradients.

    The rows of ``projections [4 c, c_z]`` are projection and gate of ``left``, then projection and gate of ``right``.
    """

    norm: Norm
    projections: Tensor
    projections_bias: Tensor


class UpdateWeights(NamedTuple):
    """Parameters of the second half, or their gradients; ``norm`` is that of the pair, as in the first."""

    norm: Norm
    norm_out: Norm
    out: Tensor
    out_bias: Tensor
    gate: Tensor
    gate_bias: Tensor


def arrange_factors(parameters: FactorParams, dtype: torch.dtype) -> FactorWeights:
    """Arrange weights in ``dtype``, and the norm in the dtype of accumulation."""
    exact = torch.promote_types(dtype, torch.float32)

    def interleave(projection: Tensor, gate: Tensor) -> Tensor:
        both = torch.stack([projection.unflatten(0, (2, -1)), gate.unflatten(0, (2, -1))], 1)
        return both.flatten(0, 2).to(dtype)

    return FactorWeights(
        (parameters.norm_weight.to(exact), parameters.norm_bias.to(exact)),
        interleave(parameters.proj_weight, parameters.gate_weight),
        interleave(parameters.proj_bias[:, None], parameters.gate_bias[:, None]),
    )


def factor_gradients(grads: FactorWeights) -> tuple[Tensor, ...]:
    """Split gradients into those of the parameters; inverse of :func:`arrange_factors`."""
    projection, gate = (x.flatten(0, 1) for x in grads.projections.unflatten(0, (2, 2, -1)).unbind(1))
    biases = grads.projections_bias.unflatten(0, (2, 2, -1)).unbind(1)
    projection_bias, gate_bias = (x.flatten() for x in biases)
    return *grads.norm, projection, projection_bias, gate, gate_bias


def arrange_update(parameters: UpdateParams, dtype: torch.dtype) -> UpdateWeights:
    """Arrange weights in ``dtype``, and both norms in the dtype of accumulation."""
    exact = torch.promote_types(dtype, torch.float32)
    norm, norm_bias, norm_out, norm_out_bias = (x.to(exact) for x in (*parameters.norm, *parameters.norm_out))
    output = (x.to(dtype) for x in parameters.output)
    return UpdateWeights((norm, norm_bias), (norm_out, norm_out_bias), *output)


def update_gradients(grads: UpdateWeights) -> tuple[Tensor, ...]:
    """Flatten gradients to those of the parameters; inverse of :func:`arrange_update`."""
    return *grads.norm, *grads.norm_out, *grads[2:]


def of_channels(weights: FactorWeights, first: int, count: int) -> FactorWeights:
    """Return the parameters of ``count`` hidden channels from ``first`` on."""
    c = len(weights.projections) // 4
    if count == c:
        return weights

    def chosen(x: Tensor) -> Tensor:
        return x.unflatten(0, (4, c))[:, first : first + count].flatten(0, 1)

    return weights._replace(
        projections=chosen(weights.projections), projections_bias=chosen(weights.projections_bias)
    )
