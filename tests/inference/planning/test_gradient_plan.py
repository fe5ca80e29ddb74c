"""Plans of gradients: within the budget, with no more on the host than needed, and refused with a remedy."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.gradient_plan import GradientPlan, GradientPlanner, plan_gradients
from fastfold.inference.planning.memory_model import FIXED_CUDA, nccl_bytes
from fastfold.memory import BudgetError
from fastfold.products.design.gradient_report import gradient_plan_lines
from tests.helpers.networks import oracle_config

BLOCKS, N = 6, 140
MIB = 1 << 20


def config() -> object:
    found = oracle_config()
    found.model.embeddings_and_evoformer.evoformer_num_block = BLOCKS
    return found


@pytest.fixture(scope="module")
def planner() -> GradientPlanner:
    return GradientPlanner(config(), N, device="cpu", host_memory=1 << 40)


@pytest.fixture(scope="module")
def on_device(planner: GradientPlanner) -> GradientPlan:
    return planner.plan(1 << 40)


@pytest.mark.long
def test_only_as_much_waits_on_the_host_as_has_to(planner: GradientPlanner, on_device: GradientPlan) -> None:
    assert on_device.policy.recompute
    assert on_device.policy.keep_projections
    assert on_device.policy.host == 0
    smallest, without = planner.smallest(), planner.plan(on_device.peak - 1)
    assert smallest.peak < without.peak < on_device.peak
    assert without.policy == replace(on_device.policy, keep_projections=False)
    less = planner.plan(without.peak - 1)
    assert less.peak <= without.peak - 1
    assert 0 < less.policy.host <= 2 * on_device.offload_from < smallest.policy.host
    assert planner.plan(smallest.peak).policy.host == smallest.policy.host
    lines = gradient_plan_lines(less, ranks=2)
    assert lines[0].startswith("predicted peak      0.62 GiB per GPU (parameters ")
    assert lines[1].endswith("blocks of the trunk, and rows outside it")


def test_what_does_not_fit_is_refused_with_a_remedy(planner: GradientPlanner) -> None:
    smallest = planner.smallest()
    with pytest.raises(BudgetError) as caught:
        planner.plan(smallest.peak - 1)
    assert caught.value.smallest == smallest.peak
    with pytest.raises(
        InputError, match=r"140 residues needs .* found 0.37 GiB; use a device with more memory"
    ):
        plan_gradients(planner, 380 << 20)
    with pytest.raises(InputError, match=r"found .*; use precision='bf16', or take about 1"):
        plan_gradients(planner, smallest.peak - 1)


@pytest.mark.slow
def test_a_host_is_named_where_it_is_missing() -> None:
    alone = GradientPlanner(model_config("model_1_ptm"), 512)
    enough = alone.without_host_limit()
    assert enough.peak < alone.smallest().peak
    with pytest.raises(InputError, match=r"give host_memory='\d+GiB', or .*take about \d"):
        plan_gradients(alone, enough.peak)


@pytest.mark.slow
def test_longer_targets_and_kept_activations_take_more(
    planner: GradientPlanner, on_device: GradientPlan
) -> None:
    assert planner.longest(on_device.peak) >= N
    assert planner.longest(planner.smallest().peak + (1 << 28)) > planner.longest(planner.smallest().peak)
    short = GradientPlanner(model_config("model_1_ptm"), 100)
    kept, recomputed = short.plan(1 << 40), short.smallest()
    assert not kept.policy.recompute
    assert kept.peak > recomputed.peak
    assert kept.seconds < recomputed.seconds
    assert 0 < kept.forward_seconds < kept.seconds
    assert recomputed.forward_seconds == pytest.approx(kept.forward_seconds, rel=0.05)


def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of chosen numbers: recomputing halves the working tensors, and block inputs up to 100 MiB leave.

    Projections that are kept are 30 MiB.
    """

    def costs(self: GradientPlanner, recompute: bool, keep: bool, host: int) -> tuple[Any, Any]:
        away = min(host, 100 * MIB) if recompute else 0
        memory = {"parameters": 50.0 * MIB, "inputs": 100.0 * MIB - away + 30.0 * MIB * keep}
        memory["working"] = (200.0 if recompute else 400.0) * MIB
        backward = SimpleNamespace(memory=memory, host=float(away), seconds=5.0 + 2 * recompute, flops=30.0)
        return backward, SimpleNamespace(seconds=backward.seconds + 1.5, flops=40.0)

    monkeypatch.setattr(GradientPlanner, "_costs", costs)


@pytest.mark.parametrize("held", [0, 7 * MIB])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("host", [0, 60 * MIB, 1 << 60])
def test_bytes_on_a_processor_are_tensors_pages_and_the_process(
    monkeypatch: pytest.MonkeyPatch, held: int, recompute: bool, host: int
) -> None:
    _traced(monkeypatch)
    planner = GradientPlanner(model_config("model_1"), 100, device="cpu", host_memory=1, held=held)
    plan = planner._plan(recompute=recompute, host=host)
    away = min(host, 100 * MIB) if recompute else 0
    working = (200 if recompute else 400) * MIB
    parts = {"parameters": 50 * MIB, "working": working, "inputs": 100 * MIB - away, "gaps": 1.85 * working}
    if held:
        parts["held"] = held
    assert plan.parts == pytest.approx(parts)
    assert plan.peak == math.ceil(sum(parts.values())) + (520 << 20)
    assert (plan.policy.host, plan.policy.recompute) == (away, recompute)
    assert (plan.seconds, plan.forward_seconds) == (5.0 + 2 * recompute, 1.5)
    assert (plan.flops, plan.forward_flops) == (30.0, 10.0)
    assert plan.offload_from == 100 * 100 * 128 * 4
    assert plan.host_room == (away + plan.offload_from if away else 0)


@pytest.mark.parametrize("held", [0, 7 * MIB])
@pytest.mark.parametrize("host", [0, 60 * MIB, 1 << 60])
@pytest.mark.parametrize("room", [0, 300 * MIB, 2000 * MIB])
def test_the_longest_target_fills_what_grows(
    monkeypatch: pytest.MonkeyPatch, held: int, host: int, room: int
) -> None:
    """Memory grows with pairs: 570 MiB on the device with all inputs on the host, 670 MiB in both."""
    _traced(monkeypatch)
    planner = GradientPlanner(model_config("model_1"), 100, device="cpu", host_memory=host, held=held)
    times = min(room / (570 * MIB), (room + host) / (670 * MIB))
    found = planner.longest((520 << 20) + 50 * MIB + held + room)
    assert found == pytest.approx(100 * math.sqrt(times), abs=1)


@pytest.mark.parametrize(
    ("msa", "extra", "room", "proposal"),
    [(200, 300, 400, "128:256"), (200, 300, 380, None), (128, 300, 400, "128:256"), (128, 256, 100, None)],
)
def test_fewer_rows_are_proposed_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, msa: int, extra: int, room: int, proposal: str | None
) -> None:
    def costs(self: GradientPlanner, recompute: bool, keep: bool, host: int) -> tuple[Any, Any]:
        memory = {"parameters": float((self.msa + self.extra_msa) * MIB), "inputs": 0.0, "working": 0.0}
        pass_ = SimpleNamespace(memory=memory, host=0.0, seconds=1.0, flops=1.0)
        return pass_, pass_

    monkeypatch.setattr(GradientPlanner, "_costs", costs)
    planner = GradientPlanner(model_config("model_1"), 100, device="cpu", msa=msa, extra_msa=extra)
    monkeypatch.setattr(GradientPlanner, "longest", lambda *_: 0)
    with pytest.raises(InputError) as caught:
        plan_gradients(planner, planner.fixed + room * MIB)
    assert str(caught.value).count("max_msa=") == (proposal is not None)
    assert f"max_msa='{proposal}'" in str(caught.value) or proposal is None


@pytest.mark.parametrize(("precision", "size", "position"), [("fp32", 4, 8 << 10), ("bf16", 2, 6 << 10)])
@pytest.mark.parametrize(("ranks", "residues"), [(1, 100), (3, 100), (1, 400)])
@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_on_a_gpu_have_blocks_of_rows_and_gaps(
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    size: int,
    position: int,
    ranks: int,
    residues: int,
    recompute: bool,
) -> None:
    """Of at most 2¹⁷ positions of attention, and of the pairs of a block of the structure module's rows."""
    _traced(monkeypatch)
    planner = GradientPlanner(model_config("model_1"), residues, precision, ranks=ranks)
    plan = planner._plan(recompute=recompute)
    pairs = math.ceil(residues / ranks) * residues
    working = (200 if recompute else 400) * MIB + min(pairs, 1 << 17) * position
    if recompute:
        working = max(working, min(pairs, plan.policy.pairs) * (9 << 10))
    parts = {"parameters": 50 * MIB, "working": working, "inputs": 100 * MIB}
    assert plan.parts == pytest.approx(parts | {"gaps": 0.025 * sum(parts.values())})
    assert plan.peak == math.ceil(sum(plan.parts.values())) + FIXED_CUDA + nccl_bytes(ranks)
    assert plan.offload_from == pairs * 128 * size
    away = planner._plan(recompute=True, host=MIB)
    assert away.parts["gaps"] == pytest.approx(0.15 * (sum(away.parts.values()) - away.parts["gaps"]))


def test_the_fastest_plan_within_a_budget_offloads_no_more_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _traced(monkeypatch)
    planner = GradientPlanner(model_config("model_1"), 100, device="cpu", host_memory=80 * MIB)
    kept, plain, device_kept, device, smallest = (
        planner._plan(recompute=recompute, keep=keep, host=host)
        for recompute, keep, host in (
            (False, True, 0),
            (False, False, 0),
            (True, True, 0),
            (True, False, 0),
            (True, False, 80 * MIB),
        )
    )
    assert kept.peak > plain.peak > device_kept.peak > device.peak > smallest.peak
    assert kept.policy.keep_projections
    assert not plain.policy.keep_projections
    assert planner.plan(kept.peak) == kept
    assert planner.plan(kept.peak - 1) == plain
    assert planner.plan(plain.peak - 1) == device_kept
    assert planner.plan(device_kept.peak - 1) == device
    on_gpu = replace(planner, device="cuda", host_memory=0)
    assert on_gpu.plan(1 << 60) == on_gpu._plan(recompute=False)
    assert planner.plan(device.peak) == device
    assert planner.smallest() == smallest
    less = planner.plan(device.peak - MIB)
    assert less.policy.host == MIB + device.offload_from
    assert planner.plan(smallest.peak) == smallest
    with pytest.raises(BudgetError) as error:
        planner.plan(smallest.peak - 1)
    assert error.value.smallest == smallest.peak
    long = replace(planner, residues=128)
    assert long.plan(1 << 60).policy.recompute
    assert planner.without_host_limit().policy.host == 100 * MIB
    with pytest.raises(BudgetError) as error:
        replace(planner, host_memory=0).plan(device.peak - 1)
    assert error.value.smallest == device.peak
