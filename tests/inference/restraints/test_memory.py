"""Gradients of restraints are planned with the fold, and refused where they do not fit (restraints/fit.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.errors import InputError
from fastfold.inference.planning.fit import Fit, fit_target
from fastfold.inference.planning.gradient_plan import GradientPlanner
from fastfold.inference.restraints import fit as restraint_fit
from fastfold.inference.restraints.fit import plan_restraints
from tests.helpers.networks import oracle_config, random_model

CPU = torch.device("cpu")
PLANNERS: dict[str, GradientPlanner] = {}  #: Of the target of ``fit``, by sizes and options


@pytest.fixture(scope="module")
def fit() -> Fit:
    config = oracle_config("synthetic_monomer")
    config.model.heads.structure_module.num_layer = 1
    model = random_model(config, dtype=torch.float32)
    return fit_target(model, CPU, 40, None, name="T1", rows=1, templates=0)


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the same target trace the network once."""

    def planner_once(config: Any, *sizes: Any, **options: Any) -> GradientPlanner:
        key = repr((sizes, options))
        if key not in PLANNERS:
            PLANNERS[key] = GradientPlanner(config, *sizes, **options)
        return PLANNERS[key]

    monkeypatch.setattr(restraint_fit, "GradientPlanner", planner_once)


def _of_rows(fit: Fit, rows: int) -> Fit:
    return replace(fit, planner=replace(fit.planner, rows=rows))


@pytest.mark.long
def test_short_targets_without_an_alignment_are_planned_only_within_a_budget(
    fit: Fit, traced_once: None
) -> None:
    assert plan_restraints(fit, is_limited=False) is None
    plan = plan_restraints(fit, is_limited=True)
    assert plan is not None
    assert not plan.policy.recompute
    # Six copies of 49 and 22 channels in float32.
    assert plan.parts["held"] == 6 * 71 * 4 * 40


@pytest.mark.long
def test_the_rows_of_an_alignment_count(fit: Fit) -> None:
    short, deep = (plan_restraints(_of_rows(fit, rows), is_limited=True) for rows in (1, 40))
    assert short is not None
    assert deep is not None
    assert deep.peak > short.peak
    assert plan_restraints(replace(fit, residues=150), is_limited=False) is not None


def test_a_gradient_that_does_not_fit_is_refused_with_a_remedy(fit: Fit, traced_once: None) -> None:
    with pytest.raises(
        InputError, match=r"T1, steps towards restraints.*a gradient of 40 residues needs .* found 0.10 GiB; "
    ):
        plan_restraints(replace(fit, budget=100 << 20), is_limited=True)


@pytest.mark.long
def test_fewer_rows_are_proposed_where_they_fit(fit: Fit) -> None:
    config = oracle_config("synthetic_monomer")
    config.data.eval.max_msa_clusters = 2000
    deep = replace(fit, planner=replace(fit.planner, config=config, rows=2000))
    few = plan_restraints(_of_rows(deep, 128), is_limited=True)
    assert few is not None
    with pytest.raises(InputError, match=r"use max_msa='128:\d+', or "):
        plan_restraints(replace(deep, budget=few.peak + (64 << 20)), is_limited=True)


@pytest.mark.parametrize(("device", "host"), [("cuda", 7), ("cpu", 0)])
@pytest.mark.parametrize(("size", "precision"), [(2, "bf16"), (4, "fp32")])
def test_gradients_are_planned_with_the_sizes_of_the_fold(
    monkeypatch: pytest.MonkeyPatch, device: str, host: int, size: int, precision: str
) -> None:
    """Host memory is for GPUs; a product of sizes of 128 times 128 is planned, and less only within a budget."""
    planned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(restraint_fit, "GradientPlanner", lambda *sizes, **more: (*sizes, more))
    monkeypatch.setattr(restraint_fit, "plan_gradients", lambda *call, name: planned.append((*call, name)))

    def plan(
        residues: int, clusters: int, extra: int, templates: int, *, is_limited: bool
    ) -> dict[str, Any] | None:
        planned.clear()
        sizes = SimpleNamespace(clusters=clusters, extra=extra, templates=templates)
        planner = SimpleNamespace(
            fold=lambda residues: sizes, config="c", element_size=size, device=device, ranks=3, host_memory=7
        )
        fit: Any = SimpleNamespace(planner=planner, residues=residues, budget=99, name="T")
        plan_restraints(fit, is_limited=is_limited)
        if not planned:
            return None
        ((made, *rest),) = planned
        assert (*made[:3], *rest) == ("c", residues, precision, 99, "T, steps towards restraints")
        return dict(made[3])

    expected = {"device": device, "ranks": 3, "host_memory": host, "msa": 5, "extra_msa": 9}
    held = 6 * 71 * 4 * 5 * 128
    assert plan(128, 5, 9, 0, is_limited=False) == {**expected, "templates": (), "held": held}
    assert plan(128, 5, 9, 2, is_limited=False) == {**expected, "templates": None, "held": held}
    assert plan(127, 5, 9, 2, is_limited=False) is None
    assert plan(127, 5, 9, 2, is_limited=True) is not None
    assert [plan(64, *rows, 0, is_limited=False) is None for rows in ((256, 1), (1, 256), (255, 255))] == [
        False,
        False,
        True,
    ]
