"""Simulated gradients of designs: plans hold, up to the aims at full size."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.gradient import SimulatedGradient, simulate_gradient
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.gradient_plan import GradientPlanner
from fastfold.memory import DeviceFull
from fastfold.products.design.tasks.protocols import hallucination

LOSSES = {"con": 1.0, "plddt": 1.0, "pae": 1.0}
H100 = 80 * 10**9


def simulate(config: Any, residues: int, budget: int, **settings: Any) -> tuple[int, SimulatedGradient]:
    planner = GradientPlanner(config, residues, **settings)
    plan = planner.plan(budget)
    found = simulate_gradient(
        config,
        hallucination(residues),
        LOSSES,
        plan,
        precision=planner.precision,
        ranks=planner.ranks,
        budget=budget,
    )
    return plan.peak, found


@pytest.mark.long
def test_a_simulated_gradient_keeps_to_its_plan() -> None:
    config = model_config("model_3_ptm")
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = 6, 1
    config.model.heads.structure_module.num_layer = 1
    least = GradientPlanner(config, 300, "bf16", host_memory=1 << 40).without_host_limit()
    found = simulate_gradient(config, hallucination(300), LOSSES, least, precision="bf16", budget=least.peak)
    assert found.peak < found.reserved <= least.peak <= 1.9 * found.reserved
    assert found.host >= 3 * 300 * 300 * 128 * 2
    with pytest.raises(DeviceFull):
        simulate_gradient(config, hallucination(300), LOSSES, least, budget=found.reserved - (64 << 20))


@pytest.mark.slow
@pytest.mark.parametrize(("residues", "gpus"), [(2000, 1), (5000, 8)])
def test_long_designs_fit_gpus_of_80_gb(residues: int, gpus: int) -> None:
    planned, found = simulate(model_config("model_1_ptm"), residues, H100, precision="bf16", ranks=gpus)
    assert found.host == 0
    assert found.reserved <= planned <= H100
    assert planned <= 1.1 * found.reserved
