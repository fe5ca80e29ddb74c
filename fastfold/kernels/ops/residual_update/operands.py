"""Operands of the end of a residual branch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class UpdateOperands(NamedTuple):
    """Operands of :func:`fastfold.kernels.residual_update`, in the order of its arguments."""

    x: Tensor
    residual: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    dropout: Tensor | None
