"""What operators cost: floating-point operations, memory traffic, workspace and kernel launches.

Every operator declares it next to its definition, for planners and cost models: PyTorch counts its own operators
(``torch.utils.flop_counter``), but a fused one is opaque to it. Two operations are counted per multiply-add of every
matrix product, as there. The backward operators keep nothing but their inputs, so they compute the forward pass again,
all but its last projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Arguments = Mapping[str, Any]
"""Arguments of a call by the names of the operator's schema."""


@dataclass(frozen=True)
class OperatorCost:
    """Cost of one call beyond reading its inputs and writing its results.

    Attributes:
        flops: Floating-point operations of its matrix products.
        traffic: Bytes of intermediate results that are written and read.
        workspace: Bytes that it holds in addition to inputs and results.
        launches: Kernels that it starts.
    """

    flops: float
    traffic: float = 0.0
    workspace: float = 0.0
    launches: int = 1


CostOf = Callable[[Arguments], OperatorCost]
OPERATOR_COSTS: dict[str, CostOf] = {}
"""By the operator's name in the namespace ``fastfold``."""


def declares_cost(*operators: str) -> Callable[[CostOf], CostOf]:
    """Decorate the function that gives the cost of a call of these operators."""

    def declare(cost: CostOf) -> CostOf:
        OPERATOR_COSTS.update(dict.fromkeys(operators, cost))
        return cost

    return declare


def no_products(call: Arguments) -> OperatorCost:
    """The cost of an operator that reads its inputs and writes its results."""
    return OperatorCost(0.0)


def size_in_bytes(x: Tensor) -> int:
    """Bytes of the elements of ``x``."""
    return x.numel() * x.element_size()


def projection_flops(x: Tensor, *weights: Tensor) -> float:
    """Of products of all positions of ``x [*, c]`` with matrices."""
    return 2.0 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights)
