"""Parameters of triangle multiplication: of its first half (edge factors), its second half (update), and both."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EPS = 1e-5  #: Added to the variance in both normalisations

FACTOR_LAYERS = ("proj_weight", "proj_bias", "gate_weight", "gate_bias")
"""Parameters of the first half without its norm, in the order of :class:`FactorParams`."""
UPDATE_LAYERS = ("out_weight", "out_bias", "out_gate_weight", "out_gate_bias")
"""Parameters of the second half without its norms, in the order of :class:`UpdateParams`."""


def factor_shapes(c_z: int, factors: int) -> tuple[tuple[int, ...], ...]:
    """Return shapes of :class:`FactorParams` for a number of channels of the left and right factor together."""
    return (c_z,), (c_z,), (factors, c_z), (factors,), (factors, c_z), (factors,)


def update_shapes(c_z: int, c: int) -> tuple[tuple[int, ...], ...]:
    """Return shapes of :class:`UpdateParams` for a product of ``c`` channels."""
    return (c_z,), (c_z,), (c,), (c,), (c_z, c), (c_z,), (c_z, c_z), (c_z,)


class FactorParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.triangle_factors`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import FactorParams, triangle_factors
        >>> layers = nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 2 * 8), nn.Linear(16, 2 * 8)])
        >>> parameters = FactorParams(*layers.parameters())
        >>> triangle_factors(torch.randn(5, 6, 16), torch.ones(5, 6), parameters).shape
        torch.Size([16, 5, 6])
    """

    norm_weight: Tensor  #: ``[c_z]``, scale of the normalisation
    norm_bias: Tensor  #: ``[c_z]``, its shift
    proj_weight: Tensor  #: P ``[2 c, c_z]``, the rows of the left factor before those of the right one
    proj_bias: Tensor  #: b ``[2 c]``
    gate_weight: Tensor  #: G ``[2 c, c_z]``, in the same order
    gate_bias: Tensor  #: g ``[2 c]``


class UpdateParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.triangle_update`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import UpdateParams, triangle_update
        >>> layers = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 16)])
        >>> parameters = UpdateParams(*layers.parameters())
        >>> triangle_update(torch.randn(8, 5, 6), torch.randn(5, 6, 16), parameters).shape
        torch.Size([5, 6, 16])
    """

    norm_weight: Tensor  #: ``[c_z]``, scale of the normalisation of ``z``
    norm_bias: Tensor  #: ``[c_z]``, its shift
    norm_out_weight: Tensor  #: ``[c]``, scale of the normalisation of the product
    norm_out_bias: Tensor  #: ``[c]``, its shift
    out_weight: Tensor  #: O ``[c_z, c]``
    out_bias: Tensor  #: o ``[c_z]``
    out_gate_weight: Tensor  #: Og ``[c_z, c_z]``
    out_gate_bias: Tensor  #: og ``[c_z]``


class TriangleParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.triangle_multiplication`: of both halves, which share the first norm.

    Example:
        >>> from torch import nn
        >>> from fastfold.kernels import TriangleParams
        >>> factors = [nn.LayerNorm(16), nn.Linear(16, 2 * 8), nn.Linear(16, 2 * 8)]
        >>> update = [nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 16)]
        >>> parameters = TriangleParams(*nn.ModuleList(factors + update).parameters())
        >>> parameters.channels, parameters.update.out_weight.shape
        (8, torch.Size([16, 8]))
    """

    norm_in_weight: Tensor
    norm_in_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    norm_out_weight: Tensor
    norm_out_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    out_gate_weight: Tensor
    out_gate_bias: Tensor

    @property
    def channels(self) -> int:
        """Hidden channels c."""
        return self.out_weight.shape[1]

    @property
    def factors(self) -> FactorParams:
        """Parameters of the first half."""
        return FactorParams(*self[:6])

    @property
    def update(self) -> UpdateParams:
        """Parameters of the second half."""
        return UpdateParams(*self[:2], *self[6:])
