"""Dropout whose mask is shared along one axis (supplement, section 1.11.6)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedDropout(nn.Module):
    """Dropout factors shared by all rows or all columns of a residual update.

    Args:
        rate: Probability that a channel is dropped.
        shared_dim: Axis along which one mask is shared: -3 for AlphaFold's ``DropoutRowwise``, -2 for
            ``DropoutColumnwise``.
    """

    def __init__(self, rate: float, shared_dim: int) -> None:
        super().__init__()
        self.rate, self.shared_dim = rate, shared_dim

    def forward(self, x: Tensor) -> Tensor | None:
        """Factors for ``x [*, rows, columns, c]``, of size one along the shared axis; None when nothing drops."""
        if not self.training or self.rate == 0.0:
            return None
        shape = list(x.shape)
        shape[self.shared_dim] = 1
        keep = 1.0 - self.rate
        return torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(keep).div_(keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, shared_dim={self.shared_dim}"
