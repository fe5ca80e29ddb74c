"""One call applies every plan to a GPT: three steps equal those of one process, every reduction is needed."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastfold.parallel
from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan, alphafold, parallelize
from fastfold.parallel.planner import fake_run
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.spawn_ranks import BACKENDS, launch
from tests.parallel.gpt_case import (
    OPTIMIZERS,
    Reference,
    difference,
    flat,
    largest_differences,
    make_gpt,
    make_parallel,
    make_tokens,
    one_step_differences,
    parallel_loss,
    three_steps,
)

PLANS: dict[int, list[tuple[ParallelPlan, str]]] = {
    2: [
        *[(ParallelPlan(dp=2, zero=zero), "adam") for zero in range(4)],
        (ParallelPlan(tp=2), "adam"),
        (ParallelPlan(sp=2), "adam"),
    ],
    4: [
        *[(ParallelPlan(dp=2, tp=2, zero=zero), "adam") for zero in (0, 1)],
        *[(ParallelPlan(dp=2, sp=2, zero=zero), "sgd") for zero in range(4)],
        (ParallelPlan(tp=4, tp_mode="2d"), "adam"),
        (ParallelPlan.from_dict({"dp_replicate": 2, "dp_shard": 2}), "lamb"),
        (ParallelPlan(dp=4, zero=3, dp_shard=4), "sgd"),
    ],
    8: [
        (ParallelPlan(dp=2, tp=4, tp_mode="2d", zero=1), "lamb"),
        (ParallelPlan(dp=2, sp=2, tp=2, zero=1), "adam"),
        (ParallelPlan(dp=8, zero=1), "adam"),
    ],
}


def _all_plans(plans: Sequence[tuple[ParallelPlan, str]]) -> list[tuple[str, float]]:
    return [
        (f"{plan}, zero {plan.zero}, {optimizer}", three_steps(plan, optimizer)) for plan, optimizer in plans
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_three_steps_equal_those_of_one_process(size: int, backend: str) -> None:
    """Gradients, parameters and optimizer state, with batches and sequences that no number of ranks divides."""
    for found in launch(_all_plans, size, PLANS[size], timeout=280, backend=backend):
        for plan, worst in found:
            assert worst < 1e-12, f"{plan}: differs by {worst}"


def test_one_process_alone_trains_the_plain_model() -> None:
    for zero in range(4):
        assert three_steps(ParallelPlan(zero=zero), "lamb") == 0


def _mutations(plans: Sequence[tuple[ParallelPlan, str]]) -> list[tuple[str, int, list[str]]]:
    return [
        (f"{plan}, zero {plan.zero}", *undetected_reductions(one_step_differences(plan, optimizer)))
        for plan, optimizer in plans
    ]


@pytest.mark.parametrize(
    ("size", "plans", "reductions"),
    [
        (
            2,
            [(ParallelPlan(dp=2, zero=zero), "lamb") for zero in range(3)] + [(ParallelPlan(sp=2), "lars")],
            [9, 11, 11, 9],
        ),
        pytest.param(
            4,
            [(ParallelPlan(dp=2, tp=2, zero=1), "lamb"), (ParallelPlan(dp=2, sp=2, zero=2), "lars")],
            [20, 22],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_reduction_is_needed(
    size: int, plans: Sequence[tuple[ParallelPlan, str]], reductions: Sequence[int]
) -> None:
    found = launch(_mutations, size, plans, timeout=280)[0]
    assert [count for _, count, _ in found] == reductions
    for plan, _, undetected in found:
        assert not undetected, f"{plan}: nothing fails without {undetected}"


def _save(plan: ParallelPlan) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    parallel = make_parallel(plan, tied=False)
    optimizer = parallel.optimizer(OPTIMIZERS["lamb"])
    for number in range(2):
        optimizer.zero_grad()
        parallel_loss(parallel, make_tokens(number)).backward()
        parallel.reduce_gradients()
        optimizer.step()
    return parallel.state_dict(), optimizer.state_dict()


def _resume(
    plans: Sequence[ParallelPlan], model: Mapping[str, Tensor], states: Mapping[str, Any]
) -> list[Any]:
    found = []
    for plan in plans:
        parallel = make_parallel(plan, tied=False)
        optimizer = parallel.optimizer(OPTIMIZERS["lamb"])
        parallel.load_state_dict(model)
        optimizer.load_state_dict(states)
        parallel_loss(parallel, make_tokens(2)).backward()
        parallel.reduce_gradients()
        optimizer.step()
        found.append((parallel.state_dict(), optimizer.state_dict()))
    return found


def test_what_one_plan_saved_every_other_plan_resumes() -> None:
    """Saved states are those of the plain model, so the number of ranks and the stage may change."""
    model, states = launch(_save, 4, ParallelPlan(dp=2, tp=2, zero=1))[0]
    plain = make_gpt(tied=False)
    assert flat(states).keys() == {
        f"{name}.{key}" for name, _ in plain.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")
    }
    expected_model, expected_states = _resume([ParallelPlan()], model, states)[0]
    others = [ParallelPlan(dp=2, zero=zero) for zero in range(4)] + [ParallelPlan(tp=2)]
    for found_model, found_states in launch(_resume, 2, others, model, states)[0]:
        assert largest_differences(found_model, expected_model) < 1e-12
        assert largest_differences(flat(found_states), flat(expected_states)) < 1e-12


class Partly(nn.Module):
    """A frozen layer, a buffer, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.used, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor, more: bool) -> Tensor:
        """The layers one after another."""
        x = self.used(self.frozen(x)) * self.scale
        return self.sometimes(x) if more else x


def _partly(zero: int) -> float:
    torch.manual_seed(0)
    plain = Partly().double()
    parallel = parallelize(copy.deepcopy(plain), {"dp": 2, "zero": zero})
    rank = parallel.mesh.group("dp").rank
    x = torch.randn(2, 3, dtype=torch.float64)
    (plain(x[0], False).sum() + plain(x[1], True).square().sum()).backward()
    found = parallel.module(x[rank], rank == 1)
    (found.square() if rank else found).sum().backward()
    parallel.reduce_gradients()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    mine = {n: p.grad for n, p in parallel.gradients.optimized.items() if p.grad is not None}
    worst = largest_differences(parallel.gradients.whole(mine), expected)
    for limit in (0.3, 1e3):  # below the norm, and above it
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), limit))
        assert (norm > limit) == (limit < 1)
        assert abs(parallel.clip_grad_norm_(limit) - norm) < 1e-12
        clipped = parallel.gradients.whole(mine)
        worst = max(worst, *(difference(clipped[name], g) for name, g in expected.items()))
    assert parallel.state_dict().keys() == plain.state_dict().keys()
    return worst


def _loaded(zero: int) -> None:
    """Frozen layers, buffers and a layer under two names take a state too."""
    plain = Partly()
    plain.again = plain.used
    parallel = parallelize(plain, {"dp": 2, "zero": zero})
    twice = {name: 2 * x for name, x in parallel.state_dict().items()}
    parallel.load_state_dict(twice)
    found = parallel.state_dict()
    assert found.keys() == twice.keys()
    assert all(torch.equal(x, twice[name]) for name, x in found.items())


def _partly_all() -> list[float]:
    for zero in range(4):
        _loaded(zero)
    return [_partly(zero) for zero in range(3)]


def test_frozen_and_unused_parameters_and_clipping() -> None:
    """A layer that one rank does not use gets the other's gradient; the clipped norm is that of the whole."""
    for found in launch(_partly_all, 2):
        assert max(found) < 1e-12


def _other_weights() -> float:
    torch.manual_seed(torch.distributed.get_rank())
    model = make_gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.distributed.get_rank())
    parallel = parallelize(model, {"dp": 2})
    return largest_differences(parallel.state_dict(), make_gpt().state_dict())


def test_every_rank_starts_from_the_first_ranks_weights() -> None:
    assert launch(_other_weights, 2) == [0, 0]


@pytest.mark.parametrize(
    ("plan", "more", "message"),
    [
        ({"dap": 2}, {}, "dap=2 needs to know how GPT is sharded: give dap="),
        ({"tp": 2}, {}, "tp=2 needs to know which layers of GPT are cut"),
        (
            {"tp": 2},
            {"layers": {"block.*": nn.Identity}},
            "no module of GPT is called block.*; did you mean blocks",
        ),
        (
            {"tp": 4, "tp_mode": "2d"},
            {"layers": {"blocks.*": nn.Identity}},
            "every layer has to be replaced; layers= lacks tokens.weight, positions.weight",
        ),
        ({"sp": 2}, {}, "sp=2 needs to know where GPT combines positions of the sequence"),
        ({"pp": 2}, {}, "pp=2 needs to know how GPT is split into stages"),
        ({"tp": 4, "tp_mode": "2d"}, {"layers": "auto"}, 'layers="auto" finds the layers of tp_mode 1d'),
        ({"dp": 3}, {}, "dp 3 = 3 ranks, but 1 was started"),
        ({"zero": 4}, {}, "parallel.zero: expected stage 0, 1, 2 or 3"),
    ],
)
def test_what_does_not_go_with_the_model_is_refused_before_any_collective(
    plan: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parallelize(make_gpt(), plan, **more)
    assert message in str(caught.value)


def test_sharding_of_proteins_refuses_a_model_that_has_none() -> None:
    with fake_run.fake_mesh(ParallelPlan(dap=2)) as mesh, pytest.raises(ConfigError) as caught:
        parallelize(make_gpt(), mesh, dap=alphafold.shard)
    assert "GPT has neither an MSA nor a pair to shard" in str(caught.value)


def test_the_general_package_knows_nothing_of_the_network() -> None:
    """What is special to AlphaFold is handed in, so any model can be given the general part."""
    folder = Path(fastfold.parallel.__file__).parent
    general = [path for path in folder.rglob("*.py") if folder / "alphafold" not in path.parents]
    assert len(general) > 40
    for path in general:
        assert not re.search(r"(from|import) fastfold\.(evoformer|parallel\.alphafold)", path.read_text()), (
            path
        )


def test_a_state_of_another_model_is_refused() -> None:
    parallel = make_parallel(ParallelPlan())
    with pytest.raises(ConfigError, match="lacks blocks"):
        parallel.load_state_dict(
            {n: x for n, x in parallel.state_dict().items() if not n.startswith("blocks.1")}
        )
    with pytest.raises(ConfigError, match=r"positions.weight: expected shape .* found \(2, 2\)"):
        parallel.load_state_dict(parallel.state_dict() | {"positions.weight": torch.zeros(2, 2)})
    other = Reference(ParallelPlan(), "sgd")
    other.step(0)
    state = {"state": other.states(), "param_groups": []}
    with pytest.raises(ConfigError, match="lacks step of"):
        parallel.optimizer(OPTIMIZERS["adam"]).load_state_dict(state)
