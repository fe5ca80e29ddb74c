"""A resumed run goes on with the learning rates that the saved one had, under any plan and schedule."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, ParallelOptimizer, parallelize
from fastfold.parallel.data_parallel.param_groups import named_groups
from tests.helpers.schedules import SCHEDULES
from tests.helpers.spawn_ranks import launch
from tests.parallel.gpt_case import make_gpt, make_parallel

STEPS, SAVED_AT = 6, 3


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _decayed(named: Mapping[str, nn.Parameter]) -> Optimizer:
    """Two groups, as most recipes have them."""
    weights = [p for name, p in named.items() if name.endswith("weight")]
    biases = [p for name, p in named.items() if name.endswith("bias")]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}],
        lr=1e-2,
    )


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (8, 3))
    return x, y


class _Run:
    def __init__(self, plan: dict[str, int], schedule: str, seed: int) -> None:
        self.parallel: Parallel = parallelize(_model(seed), plan)
        self.optimizer: ParallelOptimizer = self.parallel.optimizer(_decayed)
        self.schedule = SCHEDULES[schedule](self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x, y = _batch(step)
            rows = self.parallel.rows(len(x))
            self.optimizer.zero_grad()
            (self.parallel(x[rows]) - y[rows]).square().mean().backward()
            self.optimizer.step()
            # A loss that never improves.
            plateau = isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau)
            self.schedule.step(*([1.0] if plateau else []))

    @property
    def states(self) -> tuple[Any, Any, Any]:
        return self.parallel.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()

    def load(self, states: tuple[Any, Any, Any]) -> None:
        self.parallel.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        self.schedule.load_state_dict(states[2])


def _plan(zero: int) -> dict[str, int]:
    return {"dp": dist.get_world_size() if dist.is_initialized() else 1, "zero": zero}


def _apart(plan: dict[str, int], schedule: str) -> float:
    whole, first, second = (_Run(plan, schedule, seed) for seed in (0, 0, 9))
    whole.train(0, STEPS)
    first.train(0, SAVED_AT)
    second.load(copy.deepcopy(first.states))
    second.train(SAVED_AT, STEPS)
    expected = whole.parallel.state_dict()
    return max(float((x - expected[name]).abs().max()) for name, x in second.parallel.state_dict().items())


def _resumed(stages: list[int], schedules: list[str]) -> dict[str, float]:
    return {
        f"{schedule}, zero {zero}": _apart(_plan(zero), schedule) for zero in stages for schedule in schedules
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_of_one_process_equals_one_run(schedule: str) -> None:
    assert _apart({"dp": 1}, schedule) == 0


@pytest.mark.long
@pytest.mark.parametrize("zero", range(4))
def test_a_resumed_run_equals_one_run_under_every_schedule(zero: int) -> None:
    for found in launch(_resumed, 2, [zero], list(SCHEDULES)):
        assert len(found) == len(SCHEDULES)
        assert set(found.values()) == {0.0}, found


def _write(zero: int) -> tuple[Any, Any, Any]:
    run = _Run(_plan(zero), "exponential", 0)
    run.train(0, SAVED_AT)
    return run.states


def _go_on(zero: int, states: tuple[Any, Any, Any]) -> tuple[list[float], dict[str, Tensor]]:
    run = _Run(_plan(zero), "exponential", 9)
    run.load(states)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    run.train(SAVED_AT, STEPS)
    return rates, run.parallel.state_dict()


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), [(1, 3), (3, 0)])
def test_fewer_ranks_resume_the_same_rates(writer: int, reader: int) -> None:
    states = launch(_write, 4, writer)[0]
    found = [launch(_go_on, ranks, reader, states)[0] for ranks in (2, 1)]
    for rates, _ in found:
        assert rates == [1e-2 * 0.5**3, 2e-2 * 0.5**3]
    for name, x in found[0][1].items():
        torch.testing.assert_close(x, found[1][1][name], rtol=1e-12, atol=1e-12)


def test_groups_name_the_plain_model_s_parameters() -> None:
    run = _Run({"dp": 1}, "exponential", 0)
    weights, biases = run.optimizer.state_dict()["param_groups"]
    assert weights["params"] == ["0.weight", "2.weight"]
    assert biases["params"] == ["0.bias", "2.bias"]
    assert (weights["lr"], biases["lr"], weights["initial_lr"]) == (1e-2, 2e-2, 1e-2)
    assert weights["betas"] == (0.9, 0.999)
    assert (weights["weight_decay"], biases["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in run.parallel.module.named_parameters()}
    groups = named_groups(run.optimizer.param_groups, names, run.parallel._full_state)
    assert groups == run.optimizer.state_dict()["param_groups"]


def test_options_reach_a_rate_that_is_a_tensor_and_lists_become_tuples() -> None:
    def with_tensor(named: Mapping[str, nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(named.values(), lr=torch.tensor(0.5))

    optimizer = parallelize(_model(0), {"dp": 1}).optimizer(with_tensor)
    rate = optimizer.param_groups[0]["lr"]
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.5
    state["param_groups"][0] |= {"lr": 0.125, "betas": [0.5, 0.6]}
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.125
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_a_state_without_groups_is_named() -> None:
    run = _Run({"dp": 1}, "exponential", 0)
    run.train(0, 1)
    old = run.optimizer.state_dict()["state"]
    other = _Run({"dp": 1}, "exponential", 1)
    with pytest.warns(UserWarning, match="no param_groups.*learning rates"):
        other.optimizer.load_state_dict(old)
    assert torch.equal(other.optimizer.state_dict()["state"]["0.bias"]["exp_avg"], old["0.bias"]["exp_avg"])


def test_a_group_that_was_two_is_refused() -> None:
    def one_group(named: Mapping[str, nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(named.values(), lr=1e-2)

    run = _Run({"dp": 1}, "exponential", 0)
    other = parallelize(_model(0), {"dp": 1}).optimizer(one_group)
    with pytest.raises(ConfigError, match=r"0\.weight and 0\.bias in one parameter group"):
        other.load_state_dict(run.optimizer.state_dict())


def _by_dimension(named: Mapping[str, nn.Parameter]) -> Optimizer:
    matrices = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "lr": 0.5}, {"params": rest, "lr": 0.25}], lr=1e-2)


def _through_a_checkpoint(plans: list[dict[str, int]], folder: str) -> list[tuple[list[Any], list[float]]]:
    """Groups of each plan, and rates after their checkpoint was read under the next plan."""
    made = [make_parallel(plan, tied=False).optimizer(_by_dimension) for plan in plans]
    found = []
    for number, (writer, reader) in enumerate(zip(made, [*made[1:], made[0]], strict=True)):
        writer.initialize(), reader.initialize()
        saved = {"optimizer": writer.sharded_state_dict()}
        dcp.save(saved, checkpoint_id=f"{folder}/{number}")
        for group in reader.param_groups:
            group["lr"] = 0.0
        read = {"optimizer": reader.sharded_state_dict()}
        dcp.load(read, checkpoint_id=f"{folder}/{number}")
        reader.load_state_dict(read["optimizer"])
        found.append((saved["optimizer"]["param_groups"], [group["lr"] for group in reader.param_groups]))
    return found


def test_layers_in_parts_and_stages_keep_their_groups(tmp_path: Path) -> None:
    """A bias may have another rate than the weight of its layer, which ranks have a part of."""
    plain = _by_dimension(dict(make_gpt(tied=False).named_parameters())).param_groups
    of_shape = dict(make_gpt(tied=False).named_parameters())
    plans = [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}]
    for found in launch(_through_a_checkpoint, 2, plans, str(tmp_path)):
        for groups, rates in found:
            assert rates == [0.5, 0.25]
            assert [group["lr"] for group in groups] == [0.5, 0.25]
            assert [len(group["params"]) for group in groups] == [len(group["params"]) for group in plain]
            for group, is_matrix in zip(groups, (True, False), strict=True):
                assert all((of_shape[name].dim() > 1) == is_matrix for name in group["params"])
