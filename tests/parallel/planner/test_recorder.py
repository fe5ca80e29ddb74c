"""Costs of PyTorch's operators are those of their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.kernels.common.cost import OperatorCost
from fastfold.parallel.planner.recorder import operator_cost

aten = torch.ops.aten
HEADS, ROWS, KEYS, CHANNELS = 2, 5, 7, 8


class _Costs(TorchDispatchMode):
    """Costs of all operators that have some, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, OperatorCost] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        cost = operator_cost(func, args, kwargs or {}, out)
        if cost.flops or cost.exponentials or cost.launches != 1:
            self.costs[func._schema.name.partition("::")[2]] = cost
        return out


def _costs(compute: Callable[[], object]) -> dict[str, OperatorCost]:
    with _Costs() as mode:
        compute()
    return mode.costs


@pytest.mark.parametrize(
    ("name", "compute", "flops"),
    [
        ("mm", lambda x: torch.mm(x[0], x[0].T), 2 * 3 * 3 * 4),
        ("addmm", lambda x: torch.addmm(torch.zeros(3), x[0], x[0].T), 2 * 3 * 3 * 4),
        ("bmm", lambda x: torch.bmm(x, x.mT), 2 * 2 * 3 * 3 * 4),
        ("baddbmm", lambda x: torch.baddbmm(torch.zeros(3), x, x.mT), 2 * 2 * 3 * 3 * 4),
        ("convolution", lambda x: F.conv1d(x, torch.ones(5, 3, 2)), 2 * 2 * 5 * 3 * 3 * 2),
    ],
)
def test_a_product_has_two_operations_for_each_term(
    name: str, compute: Callable[[Tensor], Tensor], flops: float
) -> None:
    assert {key: cost.flops for key, cost in _costs(lambda: compute(torch.ones(2, 3, 4))).items()} == {
        name: flops
    }


def test_views_and_sums_have_no_operations_and_views_no_launches() -> None:
    x = torch.ones(2, 3)
    assert _costs(lambda: x + x.exp().sum()) == {}
    assert {key: cost.launches for key, cost in _costs(lambda: x.new_empty(3)).items()} == {"new_empty": 0}
    assert _costs(lambda: torch.empty_like(x))["empty_like"].flops == 0


def _queries(device: str) -> list[Tensor]:
    shapes = (ROWS, KEYS, KEYS)
    return [torch.zeros(3, HEADS, rows, CHANNELS, device=device, requires_grad=True) for rows in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_multiplies_twice_and_five_times_in_its_backward_pass(is_causal: bool) -> None:
    """On the CPU; each score is an exponential, and a causal mask leaves half of all."""
    scores = 3 * HEADS * ROWS * KEYS
    share = 0.5 if is_causal else 1.0

    def compute() -> None:
        F.scaled_dot_product_attention(*_queries("cpu"), is_causal=is_causal).sum().backward()

    costs = _costs(compute)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert costs.keys() == {name, f"{name}_backward"}
    forward, backward = costs[name], costs[f"{name}_backward"]
    assert (forward.flops, backward.flops) == (share * 4 * CHANNELS * scores, share * 10 * CHANNELS * scores)
    assert (forward.exponentials, backward.exponentials) == (share * scores, share * scores)
    assert (forward.launches, backward.launches) == (1, 2)


@pytest.mark.parametrize(
    "name", ["_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"]
)
def test_attention_of_gpus_has_the_same_operations(name: str) -> None:
    scores = 3 * HEADS * ROWS * KEYS
    queries = [x.detach().half() for x in _queries("meta")]
    more = [None, False] if "efficient" in name else []
    (cost,) = _costs(lambda: getattr(aten, name)(*queries, *more)).values()
    assert (cost.flops, cost.exponentials, cost.launches) == (4 * CHANNELS * scores, scores, 1)
