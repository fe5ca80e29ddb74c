"""Layouts and plans of a number of ranks are those of their definition, each once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from torch import nn

from fastfold.parallel import ParallelPlan
from fastfold.parallel.planner.workload import Repeat, Workload, divisors, standard_layouts


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (7, [1, 7]), (12, [1, 2, 3, 4, 6, 12])])
def test_divisors_are_in_order(number: int, expected: list[int]) -> None:
    assert divisors(number) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 9, 12, 16])
@pytest.mark.parametrize("grid", [False, True])
def test_layouts_are_all_products_of_groups_within_their_limits(ranks: int, grid: bool) -> None:
    """Grids are as square as their number allows; squares, cubes and boxes of tensor parallelism need such numbers."""
    expected = set()
    for dap, sp, tp in itertools.product(range(1, 17), repeat=3):
        if dap * sp * tp != ranks or dap > 12 or sp > 2 or tp > 9:
            continue
        axes: list[dict[str, Any]] = [{"dap": dap}]
        rows = max(n for n in range(1, dap + 1) if dap % n == 0 and n <= math.sqrt(dap))
        if grid and rows > 1:
            axes.append({"dap": dap, "dap_mode": "grid", "dap_rows": None if rows**2 == dap else rows})
        kinds: list[dict[str, Any]] = [{"tp": tp, "tp_mode": "1d"}] if tp > 1 else [{}]
        if tp in (4, 9):
            kinds.append({"tp": tp, "tp_mode": "2d"})
        if tp == 8:
            kinds += [{"tp": 8, "tp_mode": "3d"}, {"tp": 8, "tp_mode": "2.5d", "tp_depth": 2}]
        for choice in (axis | kind for axis in axes for kind in kinds):
            expected.add(ParallelPlan(sp=sp, **{k: v for k, v in choice.items() if v is not None}))
    found = list(standard_layouts(dap=12, sp=2, tp=9, tp_modes=("1d", "2d", "2.5d", "3d"), grid=grid)(ranks))
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize("ranks", [1, 4, 6, 8])
def test_plans_have_a_sample_for_each_replica_and_stages_that_the_model_has(ranks: int) -> None:
    """Stages 2 and 3 of ZeRO exclude a pipeline, and a lone replica needs none; TP of 2 runs two rows at once."""
    workload = Workload(
        "w",
        lambda mesh: nn.Linear(1, 1),
        lambda model: next(model.parameters()).sum(),
        samples=6,
        stacks={"": Repeat(4)},
        layouts=standard_layouts(tp=2),
        rows=lambda layout: layout.tp,
        stages=3,
    )
    expected = set()
    for dp, pp, tp, zero in itertools.product(range(1, 9), range(1, 9), (1, 2), range(4)):
        if dp * pp * tp != ranks or pp > 3 or dp * tp > 6:
            continue
        if (zero and dp == 1) or (zero > 1 and pp > 1):
            continue
        expected.add(ParallelPlan(dp=dp, pp=pp, tp=tp, zero=zero))
    found = list(workload.plans(ranks))
    assert len(found) == len(set(found))
    assert set(found) == expected
