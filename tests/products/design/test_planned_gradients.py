"""Gradients by a plan: recomputed rows and inputs on the host change nothing but memory."""

from __future__ import annotations

import copy

import pytest
import torch

from fastfold.evoformer.execution import PolicyModule
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import set_precision
from fastfold.inference.folding.gradients import CHECKPOINTED, GradientPolicy, GradientRun, SavedInputs
from fastfold.parallel import ParallelPlan, alphafold
from fastfold.parallel.mesh import ParallelMesh
from fastfold.products.design.evaluate import Evaluation, Evaluator
from fastfold.products.design.tasks.protocols import hallucination
from fastfold.products.design.tasks.task import DesignTask
from tests.helpers.networks import oracle_config, random_model
from tests.helpers.spawn_ranks import launch

LOSSES = {"con": 1.0, "plddt": 1.0, "pae": 0.5, "rg": 0.1, "helix": 0.1}


def evaluate(model: AlphaFold, task: DesignTask, run: GradientRun, dropout: bool = True) -> Evaluation:
    x = torch.randn(task.num_parameters, 20, generator=torch.manual_seed(0)).double()
    made = Evaluator(task, [model], LOSSES, gradients=run)
    return made(x, Relaxation(soft=0.6), recycles=1, dropout=dropout, seed=3)


@pytest.mark.parametrize("kind", ["multimer", pytest.param("monomer", marks=pytest.mark.slow)])
def test_a_plan_changes_no_gradient(kind: str, request: pytest.FixtureRequest) -> None:
    model = copy.deepcopy(request.getfixturevalue(kind)).double()
    task = hallucination(10, copies=1 if kind == "monomer" else 2)
    saved = SavedInputs(1 << 20, 4000, torch.device("cpu"))
    plain = evaluate(model, task, GradientRun(GradientPolicy(False, templates=())))
    policy = GradientPolicy(True, pairs=30, templates=(), keep_projections=True)
    planned = evaluate(model, task, GradientRun(policy, saved))
    assert saved.saved.sent > 0
    assert saved.tier.used == 0  # all came back
    assert planned.losses == pytest.approx(plain.losses, rel=1e-12)
    torch.testing.assert_close(planned.gradient, plain.gradient, rtol=1e-12, atol=1e-14)


def test_templates_that_are_not_there_are_left_out(monomer: AlphaFold) -> None:
    model = copy.deepcopy(monomer).double()
    found = [
        evaluate(model, hallucination(10), GradientRun(GradientPolicy(False, templates=shown)), dropout=False)
        for shown in (None, ())
    ]
    assert found[0].losses == found[1].losses
    torch.testing.assert_close(found[0].gradient, found[1].gradient, rtol=1e-12, atol=1e-14)


def test_policies_leave_no_trace(monomer: AlphaFold) -> None:
    before = [(type(m), getattr(m, "policy", None)) for m in monomer.modules()]
    model = copy.deepcopy(monomer).double()
    evaluate(model, hallucination(10), GradientRun(GradientPolicy(True, pairs=30)))
    assert [(type(m), getattr(m, "policy", None)) for m in model.modules()] == before


@pytest.mark.parametrize("keep", [True, False])
def test_blocks_of_the_trunk_alone_keep_projections(monomer: AlphaFold, keep: bool) -> None:
    policies = GradientPolicy(False, keep_projections=keep).policies(monomer)
    trunk = [m for stack in (monomer.evoformer, monomer.extra_msa_stack) for m in stack.modules()]
    kept = {module: policy.keep_projections for module, policy in policies.items()}
    assert {kept[m] for m in trunk if isinstance(m, PolicyModule)} == {keep}
    assert not kept[monomer.structure_module]


def test_long_targets_are_recomputed() -> None:
    assert not GradientPolicy.of_length(CHECKPOINTED - 1).recompute
    long = GradientPolicy.of_length(4000, ranks=2)
    assert long.recompute
    assert long.pairs == 4000 * 4000 // 32


def _shared(plan: ParallelPlan, task: DesignTask, kind: str) -> tuple[Evaluation, Evaluation]:
    """Evaluate on one rank and on all of them."""
    model = random_model(oracle_config(f"synthetic_{kind}"), dtype=torch.float64)
    alone = evaluate(model, task, GradientRun(GradientPolicy(False, templates=())), dropout=False)
    mesh = ParallelMesh(plan)
    sharded = alphafold.shard(copy.deepcopy(model), mesh)
    saved = SavedInputs(1 << 20, 1000, torch.device("cpu"))
    run = GradientRun(GradientPolicy(True, pairs=30, templates=()), saved, mesh.group("dap"))
    found = evaluate(sharded, task, run, dropout=False)
    assert saved.saved.sent > 0
    return alone, found


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "monomer"),
        pytest.param(4, "monomer", marks=pytest.mark.slow),
        pytest.param(4, "multimer", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_a_gradient(ranks: int, kind: str) -> None:
    """Of 11 or 22 residues, which no number of ranks divides; with recomputed rows and inputs on the host."""
    task = hallucination(11, copies=1 if kind == "monomer" else 2)
    for alone, shared in launch(_shared, ranks, ParallelPlan(dap=ranks), task, kind, timeout=500.0):
        assert shared.losses == pytest.approx(alone.losses, rel=1e-12)
        torch.testing.assert_close(shared.gradient, alone.gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "bound"),
    [("exp_res", 0.98), ("rg", 0.9), pytest.param("con", 0.7, marks=pytest.mark.slow)],
)
def test_gradients_in_bfloat16_point_where_those_in_float32_do(
    whole_monomer: AlphaFold, loss: str, bound: float
) -> None:
    """By the cosine of their angle; docs/design.md states the bounds."""
    task = hallucination(24)
    x = torch.randn(24, 20, generator=torch.manual_seed(1))
    exact, rounded = (
        Evaluator(task, [model], {loss: 1.0})(x, Relaxation(soft=0.6))
        for model in (whole_monomer, set_precision(copy.deepcopy(whole_monomer), "bf16"))
    )
    assert exact.gradient is not None
    assert rounded.gradient is not None
    gradients = exact.gradient.flatten(), rounded.gradient.flatten()
    assert not torch.equal(*gradients)
    assert float(torch.cosine_similarity(*gradients, dim=0)) > bound
    assert rounded.loss == pytest.approx(exact.loss, rel=0.02)
