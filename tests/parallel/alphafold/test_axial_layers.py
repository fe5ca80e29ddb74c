"""Dynamic axial parallelism, layer by layer: outputs and all gradients are those of one process."""

from __future__ import annotations

import pytest

from fastfold.parallel.alphafold.regather import RegatheringLayer
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.spawn_ranks import launch
from tests.parallel.alphafold.axial_cases import CASES, differences


def _worst(ranks: int, batch: tuple[int, ...]) -> dict[str, tuple[str, float]]:
    mesh = ParallelMesh(ParallelPlan(dap=ranks))
    found = {}
    for name, case in CASES.items():
        each = differences(case, mesh, batch)
        worst = max(each, key=lambda key: each[key])
        found[name] = (worst, each[worst])
    return found


@pytest.mark.parametrize(
    ("ranks", "batch"),
    [(2, ()), (4, (2,)), pytest.param(8, (), marks=pytest.mark.slow)],
)
def test_every_layer_equals_one_process(ranks: int, batch: tuple[int, ...]) -> None:
    """With dropout, masks, lengths that do not divide, a batch, and (8 ranks) shards that are empty."""
    for rank, found in enumerate(launch(_worst, ranks, ranks, batch)):
        for name, (worst, error) in found.items():
            assert error < 1e-12, f"{name}, rank {rank}: {worst} differs by {error}"


def _keeping() -> float:
    RegatheringLayer.keeps_gathered = True
    mesh = ParallelMesh(ParallelPlan(dap=2))
    cases = ("row attention", "outer product", "starting", "ending")
    return max(max(differences(CASES[name], mesh).values()) for name in cases)


def test_steps_that_keep_what_they_gather_equal_one_process() -> None:
    """As in blocks that are recomputed; in the other cases the backward pass gathers again."""
    assert max(launch(_keeping, 2)) < 1e-12
