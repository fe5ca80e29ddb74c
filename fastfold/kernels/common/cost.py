"""Costs of operators: floating-point operations, memory traffic, workspace and kernel launches.

Every operator declares its cost next to its definition, for planners and cost models. PyTorch counts its own operators
(``torch.utils.flop_counter``), but cannot look into a fused one. Like PyTorch, a cost counts two operations per
multiply-add of every matrix product. Backward operators keep only their inputs, so they compute the forward pass again
except its last projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Arguments = Mapping[str, Any]  #: Arguments of a call by their names in the operator's schema


@dataclass(frozen=True)
class OperatorCost:
    """Cost of one call beyond reading its inputs and writing its results."""

    flops: float  #: Floating-point operations of its matrix products
    traffic: float = 0.0  #: Bytes of intermediate results that are written and read
    workspace: float = 0.0  #: Bytes held in addition to inputs and results
    launches: int = 1  #: Number of kernels launched
    exponentials: float = 0.0  #: Number of exponentials of its softmax


CostOf = Callable[[Arguments], OperatorCost]
OPERATOR_COSTS: dict[str, CostOf] = {}  #: Cost functions by the operator's name in the namespace ``fastfold``


def no_products(call: Arguments) -> OperatorCost:
    """Return the cost of an operator that only reads its inputs and writes its results."""
    return OperatorCost(0.0)


def size_in_bytes(x: Tensor) -> int:
    """Return the size of ``x`` in bytes."""
    return x.numel() * x.element_size()


def projection_flops(x: Tensor, *weights: Tensor) -> float:
    """Return the operations of multiplying all positions of ``x [*, c]`` by the weights."""
    return 2.0 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights)
