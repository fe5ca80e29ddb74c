"""The pair on a grid of ranks: stacks and whole networks compute and train as one process does."""

from __future__ import annotations

from functools import partial

import pytest

from fastfold.parallel.alphafold import grid_parallel
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.parallel.axial_cases import CASES, differences
from tests.parallel.launch import launch

STACKS = [name for name in CASES if name.endswith("stack")]
BOUND = 1e-12


def _worst(plan: ParallelPlan, ways: dict[str, str], batch: tuple[int, ...]) -> dict[str, tuple[str, float]]:
    mesh = ParallelMesh(plan)
    found = {}
    for name in STACKS:
        each = differences(CASES[name], mesh, batch, partial(grid_parallel, **ways))
        worst = max(each, key=lambda key: each[key])
        found[name] = (worst, each[worst])
    return found


def _grid(ranks: int, rows: int = 0) -> ParallelPlan:
    return ParallelPlan(dap=ranks, dap_mode="grid", dap_rows=rows)


RING = {"contraction": "summa", "attention": "ring"}
SWITCH = {"contraction": "channels", "attention": "switch"}


@pytest.mark.parametrize(
    ("plan", "ways", "batch"),
    [
        (_grid(2, 1), RING, ()),
        (_grid(4), RING, (2,)),
        (_grid(4), SWITCH, ()),
        pytest.param(_grid(2, 2), SWITCH, (2,), marks=pytest.mark.slow),
        pytest.param(_grid(6, 2), RING, (), marks=pytest.mark.slow),
        pytest.param(_grid(9), {}, (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_stack_equals_one_process(
    plan: ParallelPlan, ways: dict[str, str], batch: tuple[int, ...]
) -> None:
    """With dropout, masks, lengths that do not divide, a batch, and (9 ranks) blocks that are empty."""
    for rank, found in enumerate(launch(_worst, plan.ranks, plan, ways, batch, timeout=300.0)):
        for name, (worst, error) in found.items():
            print(name, error)
            assert error < BOUND, f"{name}, rank {rank}: {worst} differs by {error}"
