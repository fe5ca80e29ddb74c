"""Optimisation of designs: schedules, steps, constraints, and the same result after a stop."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import Relaxation, decode_sequence
from fastfold.evoformer.model import AlphaFold
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluator, uniform_bias
from fastfold.products.design.optimise import (
    DesignState,
    final_parameters,
    first_state,
    optimise,
    schedule,
)
from fastfold.products.design.run import DesignRequest, run_designs
from fastfold.products.design.saved import film_pdb
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination

SHORT = DesignConfig(soft_steps=2, temperature_steps=1, hard_steps=1, mutation_steps=1, tries=2)


def evaluator(model: AlphaFold, **settings: Any) -> Evaluator:
    return Evaluator(hallucination(10), [model], {"con": 1.0, "plddt": 1.0}, **settings)


def test_the_schedule_is_colabdesigns() -> None:
    steps = schedule(DesignConfig(soft_steps=4, temperature_steps=2, hard_steps=1, recycles=2))
    assert [step.stage for step in steps] == ["soft"] * 4 + ["temperature"] * 2 + ["hard"]
    assert [step.relaxation.soft for step in steps] == [0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert [step.recycles for step in steps] == [0, 1, 2, 2, 2, 2, 2]
    temperatures = [step.relaxation.temperature for step in steps]
    np.testing.assert_allclose(temperatures, [1, 1, 1, 1, 0.01 + 0.99 * 0.25, 0.01, 0.01])
    assert [step.rate for step in steps] == temperatures
    assert [step.relaxation.hard for step in steps] == [0] * 6 + [1]
    assert [step.dropout for step in steps] == [True] * 6 + [False]
    assert steps[-1].all_networks


def test_gradients_lower_the_loss(monomer: AlphaFold) -> None:
    config = DesignConfig(soft_steps=6, temperature_steps=0, hard_steps=0, dropout=False)
    made = Evaluator(hallucination(10), [monomer], {"plddt": 1.0})
    state = first_state(made, config, 0)
    before = made(state.parameters, Relaxation(soft=0.5), gradient=False).loss
    optimise(made, config, 0, state)
    assert made(state.parameters, Relaxation(soft=0.5), gradient=False).loss < before - 1e-4


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_stopped_design_continues_to_the_same_numbers(monomer: AlphaFold, optimizer: str) -> None:
    config = replace(SHORT, optimizer=optimizer)  # type: ignore[arg-type]
    made = evaluator(monomer)
    whole = optimise(made, config, 3, first_state(made, config, 3))

    class Stop(Exception):
        pass

    def stop(state: DesignState) -> None:
        if state.step in (1, 3, 4):
            raise Stop

    state = first_state(made, config, 3)
    for _ in range(4):
        try:
            optimise(made, config, 3, state, stop)
        except Stop:
            state = copy.deepcopy(state)
    assert state.log == whole.log
    assert torch.equal(state.parameters, whole.parameters)
    assert torch.equal(state.best, whole.best)


def test_the_best_residues_are_kept(monomer: AlphaFold) -> None:
    made = evaluator(monomer)
    state = optimise(made, SHORT, 1, first_state(made, SHORT, 1))
    rated = [row for row in state.log if row["stage"] in ("hard", "mutate")]
    assert state.best_loss == min(row["loss"] for row in rated)
    sequence = final_parameters(made, state)
    assert sequence in {row["sequence"] for row in rated if row["loss"] == state.best_loss}
    assert len(state.trace) == state.step == 5


def test_forbidden_residues_never_appear(monomer: AlphaFold) -> None:
    made = evaluator(monomer, bias=uniform_bias("ACDEFGHIKLMNPQRST"))
    state = optimise(made, SHORT, 0, first_state(made, SHORT, 0))
    for row in state.log:
        assert set(row["sequence"]) <= set("VWY")


def test_hopeless_designs_end_after_the_first_stage(monomer: AlphaFold) -> None:
    config = DesignConfig(soft_steps=2, temperature_steps=2, hard_steps=1, give_up_below=100.0)
    made = evaluator(monomer)
    state = optimise(made, config, 0, first_state(made, config, 0))
    assert state.step == 2
    assert state.log[-1]["given_up"]
    assert optimise(made, config, 0, state).step == 2


def test_a_start_adds_gumbels_numbers_to_small_normal_ones(monomer: AlphaFold) -> None:
    """As ColabDesign's, which divides them by 2, the scale of the logits."""
    rng = np.random.default_rng([3, 0])
    expected = 0.01 * rng.normal(size=(10, 20)) + rng.gumbel(size=(10, 20)) / 2.0
    first = first_state(evaluator(monomer), DesignConfig(start="gumbel"), 3).parameters
    np.testing.assert_allclose(first.numpy(), expected, atol=1e-6)


def test_starts_differ_and_follow_the_seed(monomer: AlphaFold, backbone: Path) -> None:
    made = evaluator(monomer)
    first, same, other = (first_state(made, SHORT, seed).parameters for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    wild = DesignConfig(start="wildtype")
    with pytest.raises(ConfigError, match="no given residues"):
        first_state(made, wild, 0)
    task = fixed_backbone(backbone, chain="A", keep="A1-3")
    given = Evaluator(task, [monomer], {"dgram_cce": 1.0})
    found = decode_sequence(first_state(given, wild, 0).parameters)
    assert task.reference is not None
    assert found == decode_sequence(torch.eye(20)[task.reference.aatype])[3:]


@pytest.mark.parametrize(
    "wrong",
    [
        {"soft_steps": -1},
        {"tries": 0},
        {"learning_rate": 0.0},
        {"optimizer": "lion"},
        {"start": "x"},
        {"recycle_mode": "all"},
        {"soft_steps": 0, "temperature_steps": 0, "hard_steps": 0},
        {"networks": -1},
        {"weights": ["rg"]},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DesignConfig(**wrong)


def test_settings_may_have_the_form_of_the_command_line() -> None:
    config = DesignConfig(networks=0, weights=["rg=0.3", "con=1"])  # type: ignore[arg-type]
    assert (config.networks, config.weights) == (None, {"rg": 0.3, "con": 1.0})
    assert DesignConfig(networks=None).weights == {}


def test_the_film_has_a_model_for_each_frame() -> None:
    trace = np.random.default_rng(0).normal(size=(150, 4, 3)).astype(np.float32)
    text = film_pdb(trace, np.array([0, 0, 0, 1]))
    assert text.count("MODEL ") == 100
    last = [line for line in text.split("MODEL      100")[1].splitlines() if line.startswith("ATOM")]
    assert [line[21:26] for line in last] == ["A   1", "A   2", "A   3", "B   1"]
    np.testing.assert_allclose(
        [[float(line[a : a + 8]) for a in (30, 38, 46)] for line in last], trace[-1], atol=2e-3
    )


def test_a_design_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("fastfold.products.design.trajectory.optimise", fail)
    with pytest.raises(InputError, match="not enough for a gradient of 10 residues"):
        run_designs(DesignRequest(hallucination(10), tmp_path, config=SHORT))
