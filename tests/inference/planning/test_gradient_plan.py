"""Plans of gradients: within the budget, with no more on the host than needed, and refused with a remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.gradient_plan import GradientPlan, GradientPlanner, plan_gradients
from fastfold.memory import BudgetError
from fastfold.products.design.gradient_report import gradient_plan_lines
from tests.helpers.networks import oracle_config

BLOCKS, N = 6, 140


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
    with pytest.raises(InputError, match=r"; .*give host_memory= \d+GiB, or .*take about \d"):
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
