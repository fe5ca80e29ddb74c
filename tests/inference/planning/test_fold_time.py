"""What a plan says that a fold copies and sends is what the simulated fold copies and sends; time follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastfold.evoformer.config import model_config
from fastfold.inference.planning.planner import Planner
from fastfold.inference.planning.report import copied_bytes, fold_costs, fold_time
from fastfold.parallel.planner.hardware import FOLDING, rates
from fastfold.utils.units import GIB
from tests.inference.test_simulate import GB, MONOMER, MULTIMER, _short, _simulate, _small_budget

H100 = rates("h100", FOLDING)


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "room"),
    [
        (MONOMER, {"host_memory": 100 * GB}),
        pytest.param(MULTIMER, {"host_memory": 100 * GB}, marks=pytest.mark.slow),
        pytest.param(MONOMER, {"host_memory": GB // 4, "disk": GB // 8}, marks=pytest.mark.slow),
        pytest.param(MONOMER, {"host_memory": GB // 16, "ranks": 4}, marks=pytest.mark.slow),
    ],
)
def test_the_bytes_that_a_plan_copies_are_those_of_the_simulated_fold(
    preset: str, room: dict[str, Any]
) -> None:
    config = _short(preset)
    # All blocks of rows: left out ones copy nothing.
    found = _simulate(256, _small_budget(256, config, **room), config=config, every_block=True, **room)
    planner = Planner(config, 2, "cuda", rows=64, **room)
    assert found.copied == 2 * copied_bytes(config, planner.fold(256), found.plan) > 0


def _time(n: int, gpus: int = 1, host: int = 0, speeds: Any = H100, passes: int = 4) -> Any:
    config = model_config(MONOMER)
    planner = Planner(config, 2, "cuda", costs=fold_costs(speeds, 2), host_memory=host, ranks=gpus, rows=64)
    plan = planner.plan(n, 80 * 10**9)
    return fold_time(config, planner.fold(n), plan, speeds, passes)


def test_time_grows_with_length_and_passes_and_falls_with_gpus() -> None:
    one, two = _time(3000), _time(6000)
    assert 6 < two.seconds / one.seconds < 9  # cubic, nearly
    assert _time(3000, passes=8).seconds == pytest.approx(2 * one.seconds)
    assert (one.sending, one.sent, one.copied) == (0.0, 0.0, 0)
    eight = _time(6000, 8)
    assert two.computing / 8 <= eight.computing < two.computing / 6
    assert eight.sending > 0


def test_slower_links_take_longer_where_something_waits_or_is_sent() -> None:
    slow = rates("h100", replace(FOLDING, link_share=0.08))
    assert _time(6000, 8, speeds=slow).sending > 9 * _time(6000, 8).sending
    near, far = (_time(14_000, host=100 * GIB, speeds=speeds) for speeds in (H100, slow))
    assert near.copied > 0
    assert far.computing > near.computing


def test_memory_that_is_moved_takes_its_time() -> None:
    """With products that cost nothing the device's memory is what is waited for."""
    fast = replace(H100, matrix=dict.fromkeys(H100.matrix, 1e30))
    assert 0.01 * _time(3000).seconds < _time(3000, speeds=fast).seconds < _time(3000).seconds
