"""Plans are refused with their arithmetic, and a mesh's groups are the rows, columns and depths they are named for."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastfold.errors import ConfigError
from fastfold.parallel.comm.collectives import gather
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh
from tests.helpers.spawn_ranks import BACKENDS, launch


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": {"size": 6, "mode": "2d"}}, "tp=2d: expected a square number of ranks, found 6"),
        ({"tp": 4, "tp_mode": "3d"}, "tp=3d: expected a cubic number of ranks, found 4"),
        (
            {"tp": {"size": 12, "mode": "2.5d", "depth": 2}},
            "tp=2.5d of depth 2: expected 2 x a square number of ranks, found 12",
        ),
        ({"tp": {"size": 4, "mode": "2d", "depth": 2}}, "tp_depth=2 needs tp=2.5d, found tp=2d"),
        ({"dp": 0}, "parallel.dp: expected a number of ranks, at least 1, found 0"),
        ({"dp": True}, "parallel.dp: expected a number of ranks, at least 1, found True"),
        ({"zero": {"stage": 4}}, "parallel.zero: expected stage 0, 1, 2 or 3, found 4"),
        ({"tp_mode": "4d"}, "parallel.tp_mode: expected one of 1d, 2d, 2.5d, 3d, found '4d'"),
        ({"dap": {"size": 6, "mode": "grid"}}, "dap=grid: expected a square number of ranks, found 6"),
        (
            {"dap": 6, "dap_mode": "grid", "dap_rows": 4},
            "dap=grid of 4 rows: expected a multiple of 4 ranks, found 6",
        ),
        ({"dap": {"size": 4, "rows": 2}}, "dap_rows=2 needs dap=grid, found dap=axial"),
        ({"dap_mode": "ring"}, "parallel.dap_mode: expected one of axial, grid, found 'ring'"),
        (
            {"dap_rows": -1, "dap_mode": "grid"},
            "parallel.dap_rows: expected a number of rows, 0 for a square, found -1",
        ),
        ({"dp": 4, "dp_shard": 3, "zero": 3}, "dp_shard=3 does not divide dp=4"),
        ({"dp": 4, "dp_shard": 2, "zero": 2}, "dp_shard=2 needs zero=3 without sp and dap"),
        ({"dp": 4, "dp_shard": 1, "zero": 3}, "dp_shard=1 shards nothing"),
        ({"dp_replicate": 2}, "parallel.dp_replicate and parallel.dp_shard: expected two numbers of ranks"),
        ({"ddp": 2}, "parallel.ddp is unknown; known are dp, zero"),
        ({"tp": {"width": 2}}, "parallel.tp.width is unknown"),
        ({"tp": {"mode": "2d"}, "tp_mode": "1d"}, "parallel.tp_mode is given twice: '2d' and '1d'"),
    ],
)
def test_impossible_plans_are_refused_with_the_arithmetic(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelPlan.from_dict(values)
    assert message in str(caught.value)


def test_a_plan_for_another_number_of_ranks_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"^dp 2 x tp 3 = 6 ranks, but 8 were started$"):
        ParallelPlan(dp=2, tp=3).check_ranks(8)
    with pytest.raises(ConfigError, match=r"^dap 2 x tp 4 \(2d\) = 8 ranks, but 1 was started$"):
        ParallelMesh(ParallelPlan(dap=2, tp=4, tp_mode="2d"))


def test_a_plan_survives_the_way_through_a_dict() -> None:
    plan = ParallelPlan.from_dict(
        {"dp": 2, "zero": {"stage": 1}, "tp": {"size": 8, "mode": "2.5d", "depth": 2}}
    )
    assert plan.tp_grid == (2, 2, 2)
    assert plan.ranks == 16
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    grid = ParallelPlan.from_dict({"dap": {"size": 8, "mode": "grid", "rows": 2}})
    assert grid.dap_grid == (2, 4)
    assert str(grid) == "dap 8 (grid 2 x 4)"
    assert ParallelPlan.from_dict(grid.to_dict()) == grid


def test_one_process_alone_has_every_group() -> None:
    mesh = ParallelMesh(ParallelPlan(tp_mode="2d"))
    assert mesh.group("tp_row").size == mesh.group("replicas").size == 1
    with pytest.raises(ConfigError, match="lacks group 'tp_x'"):
        mesh.group("tp_x")


def _members(plan: ParallelPlan, names: list[str]) -> dict[str, list[int]]:
    mesh = ParallelMesh(plan)
    found = {}
    for name in names:
        process_group = mesh.group(name).process_group
        found[name] = (
            [dist.get_rank()] if process_group is None else dist.get_process_group_ranks(process_group)
        )
        assert found[name][mesh.group(name).rank] == dist.get_rank()
    return found


def _meshes() -> list[dict[str, list[int]]]:
    return [
        _members(ParallelPlan(tp=8, tp_mode="2.5d", tp_depth=2), ["tp_depth", "tp_column", "tp_row", "tp"]),
        _members(ParallelPlan(tp=8, tp_mode="3d"), ["tp_x", "tp_y", "tp_z"]),
        _members(ParallelPlan(dp=2, dap=2, pp=2), ["pp", "dp", "dap", "replicas", "tp"]),
        _members(
            ParallelPlan(dp=2, dap=4, dap_mode="grid"), ["dap_column", "dap_row", "dap", "dp", "replicas"]
        ),
    ]


def test_groups_are_the_rows_columns_and_depths_that_they_are_named_for() -> None:
    grid, cube, axes, pair = launch(_meshes, 8)[5]
    # Rank 5 = depth 1, row 0, column 1 of two 2 x 2 grids.
    assert grid == {"tp_depth": [1, 5], "tp_column": [5, 7], "tp_row": [4, 5], "tp": list(range(8))}
    assert cube == {"tp_x": [1, 5], "tp_y": [5, 7], "tp_z": [4, 5]}
    assert axes == {"pp": [1, 5], "dp": [5, 7], "dap": [4, 5], "replicas": [4, 5, 6, 7], "tp": [5]}
    # Rank 5 = the second protein's row 0, column 1.
    assert pair == {
        "dap_column": [5, 7],
        "dap_row": [4, 5],
        "dap": [4, 5, 6, 7],
        "dp": [1, 5],
        "replicas": list(range(8)),
    }


def _order() -> dict[str, list[int]]:
    mesh = ParallelMesh(ParallelPlan(dap=4, dap_mode="grid"))
    own = torch.tensor([float(dist.get_rank())])
    found = {}
    for name in ("dap_column", "dap_row", "dap"):
        found[name] = [int(rank) for rank in gather(own, 0, mesh.group(name)).tolist()]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_gathered_lies_in_the_order_of_the_grid(backend: str) -> None:
    for rank, found in enumerate(launch(_order, 4, backend=backend)):
        row, column = divmod(rank, 2)
        assert found == {
            "dap_row": [2 * row, 2 * row + 1],
            "dap_column": [column, column + 2],
            "dap": [0, 1, 2, 3],
        }


def _plans_differ() -> list[str]:
    ParallelMesh(ParallelPlan(dp=2))
    messages = []
    for plan in (ParallelPlan(dp=2, zero=dist.get_rank()), ParallelPlan(dp=1)):
        try:
            ParallelMesh(plan)
        except ConfigError as error:
            messages.append(str(error))
    ParallelMesh(ParallelPlan(dp=2))
    return messages


def test_every_rank_refuses_a_mismatched_plan_before_the_first_collective() -> None:
    for rank, (differ, count) in enumerate(launch(_plans_differ, 2)):
        assert differ == (
            "the ranks were started with different plans: "
            f"zero is {rank} on rank {rank} and {1 - rank} on rank {1 - rank}"
        )
        assert count == "dp 1 = 1 ranks, but 2 were started"


def test_shards_within_replicas_have_groups_of_neighbours() -> None:
    plan = ParallelPlan.from_dict({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    assert plan == ParallelPlan(dp=4, zero=3, dp_shard=2, tp=2)
    assert str(plan) == "dp 4 (replicate 2 x shard 2) x tp 2"
    with fake_mesh(plan, rank=5) as mesh:
        assert mesh.group("dp_shard").size == mesh.group("dp_replicate").size == 2
        assert mesh.group("dp").size == mesh.group("replicas").size == 4
        ranks = {
            name: dist.get_process_group_ranks(mesh.group(name).process_group)
            for name in ("tp", "dp_shard", "dp_replicate", "dp")
        }
    assert ranks == {"tp": [4, 5], "dp_shard": [5, 7], "dp_replicate": [1, 5], "dp": [1, 3, 5, 7]}


def _across(machine: str) -> list[str]:
    os.environ["LOCAL_WORLD_SIZE"] = machine
    found = []
    for plan in (ParallelPlan(tp=2), ParallelPlan(dap=2), ParallelPlan(dp=2)):
        try:
            ParallelMesh(plan)
        except ConfigError as error:
            found.append(str(error))
    ParallelMesh(ParallelPlan(tp=2, across_machines=True))
    return found


def test_groups_of_tp_and_dap_stay_within_a_machine_unless_asked() -> None:
    for found in launch(_across, 2, "1"):
        assert len(found) == 2
        assert all("have 2 ranks, which 1 ranks a machine split" in text for text in found)
    assert launch(_across, 2, "2") == [[], []]
    crossing = [ParallelPlan(dp=8, tp=2, dap=n).crosses_machines(8) for n in (1, 2, 3, 4, 8)]
    assert crossing == [False, False, True, False, True]
    assert not ParallelPlan(tp=3).crosses_machines(4)


def test_a_plan_across_machines_is_refused_unless_it_is_allowed() -> None:
    plan = ParallelPlan(dp=4, tp=2, dap=2)
    with pytest.raises(ConfigError, match="tp and dap have 4 ranks, which 6 ranks a machine split"):
        plan.check_machines(6)
    plan.check_machines(8)
    plan.check_machines(0)  # the number is unknown
    dataclasses.replace(plan, across_machines=True).check_machines(6)


def test_dimensions_and_groups_of_a_plan() -> None:
    plan = ParallelPlan(pp=2, dp=4, tp=8, tp_mode="2.5d", tp_depth=2, zero=3, dp_shard=2)
    assert plan.axes == {
        "pp": 2,
        "dp_replicate": 2,
        "dp_shard": 2,
        "sp": 1,
        "dap": 1,
        "tp_depth": 2,
        "tp_column": 2,
        "tp_row": 2,
    }
    assert math.prod(plan.axes.values()) == plan.ranks
    assert plan.groups["dp"] == ("dp_replicate", "dp_shard")
    assert plan.groups["replicas"] == ("dp_replicate", "dp_shard", "sp", "dap")
    assert plan.groups["tp"] == ("tp_depth", "tp_column", "tp_row")
