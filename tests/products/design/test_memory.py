"""Designs are planned before they run: what does not fit is refused, and what fits runs by its plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.gradients import GradientPolicy
from fastfold.inference.planning import gradient_plan
from fastfold.inference.planning.gradient_plan import GradientPlan, gradient_run
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import design_gradients
from fastfold.products.design.joint import plan_design, recycled_bytes
from fastfold.products.design.run import DesignRequest, run_designs
from fastfold.products.design.tasks.protocols import hallucination


@pytest.mark.slow
def test_short_designs_are_planned_only_within_a_budget(monomer: AlphaFold) -> None:
    models = [copy.deepcopy(monomer)]
    assert plan_design(hallucination(40), models, InferConfig(device="cpu"), print) is None
    plan = plan_design(hallucination(40), models, InferConfig(device="cpu", memory_budget="8GiB"), print)
    assert plan is not None
    run = design_gradients(hallucination(40), plan, torch.device("cpu"))
    assert run.policy is plan.policy
    assert not run.policy.recompute
    assert run.saved is None


@pytest.mark.long
def test_a_design_that_does_not_fit_is_refused_before_it_runs(tmp_path: Path) -> None:
    infer = InferConfig(device="cpu", memory_budget="100MiB")
    config = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=0)
    with pytest.raises(
        InputError, match=r"hallucinate.*gradient of 12 residues needs .* found 0.10 GiB; use a"
    ):
        run_designs(DesignRequest(hallucination(12), tmp_path, config=config, infer=infer))
    assert not list(tmp_path.iterdir())


def test_a_plan_with_inputs_on_the_host_has_room_for_whole_ones() -> None:
    plan = GradientPlan(
        GradientPolicy(True, host=100), peak=1, parts={}, seconds=1.0, forward_seconds=1.0, offload_from=30
    )
    run = gradient_run(plan, 40, torch.device("cpu"))
    assert run.saved is not None
    assert run.saved.stays(("saved", -1, 0), 14)
    assert not run.saved.stays(("saved", -1, 1), 130)
    assert run.saved.stays(("saved", -1, 2), 131)


@pytest.mark.parametrize(
    ("device", "free", "keeps"), [("cpu", 4.1, True), ("cpu", 3.9, False), ("cuda", 9.0, False)]
)
def test_without_a_plan_projections_are_kept_in_a_quarter_of_the_free_memory(
    device: str, free: float, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two attentions of a block with queries, keys, values and gates, a transition, and two triangles;
    # of 128 channels in float32.
    of_projections = 48 * (2 * 4 + 4 + 2 * 4) * (128 * 4) * 64**2
    monkeypatch.setattr(gradient_plan, "available_bytes", lambda _: int(of_projections * free))
    run = gradient_run(None, 64, torch.device(device))
    assert run.policy.keep_projections == keeps
    run = gradient_run(None, 64, torch.device(device), has_alignment=True)
    assert not run.policy.keep_projections


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_of_passes_are_held_by_the_modes_that_need_them(
    monomer: AlphaFold, dtype: torch.dtype
) -> None:
    """A state is the pair, the MSA's first row and all atoms; a sum has a slope and a mean for each logit."""
    model, n = copy.deepcopy(monomer).to(dtype), 7
    trunk, heads = model.config.model.embeddings_and_evoformer, model.config.model.heads
    shapes = [(n, n, trunk.pair_channel), (n, trunk.msa_channel), (n, 37, 3)]
    state = sum(torch.empty(*shape, dtype=dtype).nbytes for shape in shapes)
    logits = n * n * heads.distogram.num_bins
    if "predicted_aligned_error" in model.heads:
        logits += n * n * heads.predicted_aligned_error.num_bins
    for mode, expected in (
        ("last", 0),
        ("backprop", 4 * state),
        ("add_prev", 3 * state + 3 * logits * dtype.itemsize),
    ):
        config = DesignConfig(recycle_mode=mode, recycles=3)
        assert recycled_bytes(config, n, model) == expected
        assert recycled_bytes(replace(config, recycles=0), n, model) == 0
