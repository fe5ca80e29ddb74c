"""Parameters of triangle multiplication: of its first half (edge factors), its second half (update), and both."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EPS = 1e-5
"""Added to the variance in both normalisations."""


class FactorParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.triangle_factors`."""

    norm_weight: Tensor
    norm_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    gate_weight: Tensor
    gate_bias: Tensor


class UpdateParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.triangle_update`."""

    norm_weight: Tensor
    norm_bias: Tensor
    norm_out_weight: Tensor
    norm_out_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    out_gate_weight: Tensor
    out_gate_bias: Tensor

    @property
    def norm(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of the normalisation of the pair."""
        return self.norm_weight, self.norm_bias

    @property
    def norm_out(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of the normalisation of the product."""
        return self.norm_out_weight, self.norm_out_bias

    @property
    def output(self) -> tuple[Tensor, ...]:
        """Parameters of output and gate, each weight before bias."""
        return self.out_weight, self.out_bias, self.out_gate_weight, self.out_gate_bias


class TriangleParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.triangle_multiplication`."""

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
