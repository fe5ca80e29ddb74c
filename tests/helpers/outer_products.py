"""Operands of outer product means that tests of several implementations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.kernels import reference


def with_strides_and_residual(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs of a batch ``[2, 1]`` of 5 rows and 4 columns with other strides, and a residual."""
    left, right_mask = inputs["left"], inputs["right_mask"]
    return inputs | {
        "left": left.transpose(-1, -3).contiguous().transpose(-1, -3),
        "right_mask": right_mask.transpose(-1, -2).contiguous().transpose(-1, -2),
        "residual": torch.randn(2, 1, 4, 5, 12, dtype=torch.float64).transpose(2, 3),
    }


def added_to_residual(residual: Tensor, **rest: Tensor) -> Tensor:
    """Compute the sum of a residual and the outer product mean by its definition."""
    return residual + reference.outer_product_mean(**rest)
