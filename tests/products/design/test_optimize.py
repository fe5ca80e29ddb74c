"""Optimisation of designs: schedules, steps, constraints, and the same result after a stop."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import Relaxation, decode_sequence, encode_sequence
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.products.design.config import DesignConfig, parse_counts
from fastfold.products.design.evaluate import Evaluation, Evaluator, uniform_bias
from fastfold.products.design.limits import Limits
from fastfold.products.design.optimize import (
    DesignState,
    _descend,
    final_parameters,
    first_state,
    optimize,
    schedule,
    strand_share,
)
from fastfold.products.design.run import DesignRequest, run_designs
from fastfold.products.design.saved import film_pdb
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination
from fastfold.products.design.trajectory import SequenceOptimizer
from fastfold.protein import residue_constants as rc

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
    optimize(made, config, 0, state)
    assert made(state.parameters, Relaxation(soft=0.5), gradient=False).loss < before - 1e-4


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_stopped_design_continues_to_the_same_numbers(monomer: AlphaFold, optimizer: str) -> None:
    config = replace(SHORT, optimizer=optimizer)  # type: ignore[arg-type]
    made = evaluator(monomer)
    whole = optimize(made, config, 3, first_state(made, config, 3))

    class Stop(Exception):
        pass

    def stop(state: DesignState) -> None:
        if state.step in (1, 3, 4):
            raise Stop

    state = first_state(made, config, 3)
    for _ in range(4):
        try:
            optimize(made, config, 3, state, stop)
        except Stop:
            state = copy.deepcopy(state)
    assert state.log == whole.log
    assert torch.equal(state.parameters, whole.parameters)
    assert torch.equal(state.best, whole.best)


def test_the_best_residues_are_kept(monomer: AlphaFold) -> None:
    made = evaluator(monomer)
    state = optimize(made, SHORT, 1, first_state(made, SHORT, 1))
    rated = [row for row in state.log if row["stage"] in ("hard", "mutate")]
    assert state.best_loss == min(row["loss"] for row in rated)
    sequence = final_parameters(made, state)
    assert sequence in {row["sequence"] for row in rated if row["loss"] == state.best_loss}
    assert len(state.trace) == state.step == 5


def test_forbidden_residues_never_appear(monomer: AlphaFold) -> None:
    made = evaluator(monomer, bias=uniform_bias("ACDEFGHIKLMNPQRST"))
    state = optimize(made, SHORT, 0, first_state(made, SHORT, 0))
    for row in state.log:
        assert set(row["sequence"]) <= set("VWY")


def test_hopeless_designs_end_after_the_first_stage(monomer: AlphaFold) -> None:
    config = DesignConfig(soft_steps=2, temperature_steps=2, hard_steps=1, give_up_below=100.0)
    made = evaluator(monomer)
    state = optimize(made, config, 0, first_state(made, config, 0))
    assert state.step == 2
    assert state.log[-1]["given_up"]
    assert optimize(made, config, 0, state).step == 2


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

    monkeypatch.setattr("fastfold.products.design.trajectory.optimize", fail)
    with pytest.raises(InputError, match="not enough for a gradient of 10 residues"):
        run_designs(DesignRequest(hallucination(10), tmp_path, config=SHORT))


class Rated:
    """Evaluator whose loss falls with each call, or with the number of tryptophans of a mutant."""

    def __init__(self) -> None:
        self.task, self.models = hallucination(10), ["a", "b", "c"]
        self.limits, self.allowed = Limits(), torch.ones(20, dtype=torch.bool).numpy()
        self.calls: list[dict[str, Any]] = []

    def logits_of(self, parameters: torch.Tensor) -> torch.Tensor:
        return parameters

    def designed(self, parameters: torch.Tensor) -> str:
        return decode_sequence(parameters)

    def violation(self, parameters: torch.Tensor) -> float:
        return 0.0

    def __call__(
        self, parameters: torch.Tensor, relaxation: Relaxation, *, gradient: bool = True, **named: Any
    ) -> Evaluation:
        letters = decode_sequence(parameters)
        self.calls.append({"relaxation": relaxation, "gradient": gradient, "letters": letters, **named})
        loss = 100.0 - len(self.calls) if gradient else 50.0 - letters.count("W")
        n = len(self.task.source)
        positions = np.zeros((n, 37, 3), np.float32)
        positions[:, :, 0] = 3.8 * np.arange(n)[:, None] + 1.0
        slope = torch.ones(n, 20) if gradient else None
        return Evaluation(loss, {"con": loss}, slope, np.full(n, 80.0), positions, parameters)


def test_every_step_is_evaluated_as_scheduled_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strands after the screening steps bring more passes; a step of one network draws it."""
    monkeypatch.setattr("fastfold.products.design.optimize.strand_share", lambda task, found: 0.16)
    config = DesignConfig(
        screen_steps=2, soft_steps=3, temperature_steps=2, hard_steps=2, mutation_steps=2, tries=3,
        networks=1, all_networks=True, recycles=1, strand_recycles=3, ramp_recycles=False,
    )  # fmt: skip
    made: Any = Rated()
    seen: list[int] = []
    state = optimize(made, config, 5, first_state(made, config, 5), lambda one: seen.append(one.step))
    stages = ["screen"] * 2 + ["soft"] * 3 + ["temperature"] * 2 + ["hard"] * 2 + ["mutate"] * 2
    assert [row["stage"] for row in state.log] == stages
    assert [row["step"] for row in state.log] == seen == list(range(1, 12))
    assert [row.get("strands") for row in state.log] == [None, 0.16] + [None] * 9
    assert [call["recycles"] for call in made.calls] == [1, 1] + [3] * 7 + [3] * 6
    assert [call["gradient"] for call in made.calls] == [True] * 9 + [False] * 6
    networks = [call.get("networks") for call in made.calls]
    assert [len(one) for one in networks[:9]] == [1] * 7 + [3] * 2
    assert networks[9:] == [[0, 1, 2]] * 6
    draws = [np.random.default_rng([5, step]) for step in range(1, 8)]
    assert networks[:7] == [rng.choice(3, 1, replace=False).tolist() for rng in draws]
    assert [call["seed"] for call in made.calls[:7]] == [int(rng.integers(2**31)) for rng in draws]
    assert [call["dropout"] for call in made.calls[:9]] == [True] * 7 + [False] * 2
    # The best of three mutants counts; residues have been rated since the hard steps.
    losses = [row["loss"] for row in state.log]
    assert losses[:9] == [100.0 - n for n in range(1, 10)]
    assert state.best_loss == min(losses[7:])
    assert all(row["designed_plddt"] == row["mean_plddt"] == 80.0 for row in state.log)
    assert len(state.trace) == 11


@pytest.mark.parametrize(("share", "passes"), [(0.15, [1] * 4), (0.16, [1, 1, 3, 3])])
def test_a_sheet_of_more_than_fifteen_percent_brings_more_passes(
    share: float, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastfold.products.design.optimize.strand_share", lambda task, found: share)
    config = DesignConfig(
        screen_steps=2, soft_steps=2, temperature_steps=0, hard_steps=0, recycles=1, strand_recycles=3,
        ramp_recycles=False,
    )  # fmt: skip
    made: Any = Rated()
    optimize(made, config, 0, first_state(made, config, 0))
    assert [call["recycles"] for call in made.calls] == passes


@pytest.mark.parametrize(
    ("screen", "limit", "steps"), [(0, 80.0, 6), (0, 80.1, 2), (2, 80.1, 2), (2, 80.0, 8)]
)
def test_stages_are_judged_by_their_best_step(screen: int, limit: float, steps: int) -> None:
    """After the screening steps, or the first stage without them; equal pLDDT is enough."""
    config = DesignConfig(
        screen_steps=screen, soft_steps=2, temperature_steps=2, hard_steps=2, give_up_below=limit
    )
    made: Any = Rated()
    state = optimize(made, config, 0, first_state(made, config, 0))
    assert state.step == steps
    assert bool(state.log[-1].get("given_up")) == (limit > 80.0)


def test_mutations_change_a_residue_at_a_time_to_another_type() -> None:
    """A share of the residues is tried in each round, at least one; residues in doubt more often."""
    config = DesignConfig(
        soft_steps=0, temperature_steps=0, hard_steps=1, mutation_steps=4, tries=9, tries_percent=50.0
    )
    made: Any = Rated()
    state = first_state(made, config, 1)
    made_of: list[str] = []

    def follow(one: DesignState) -> None:
        made_of.append(one.log[-1]["sequence"])

    optimize(made, config, 1, state, follow)
    assert len(made.calls) == 1 + 4 * 5
    for last, mutant in pairwise(made_of):
        assert sum(a != b for a, b in zip(last, mutant, strict=True)) == 1
    places = _mutated_places(np.where(np.arange(10) == 1, 0.0, 100.0))
    # One residue has a doubt of 1, the others of 0.001.
    assert places.count(1) >= 38


def test_a_round_of_mutations_draws_one_network_if_steps_do() -> None:
    config = DesignConfig(
        soft_steps=0,
        temperature_steps=0,
        hard_steps=0,
        mutation_steps=3,
        tries=2,
        networks=1,
        all_networks=False,
    )
    made: Any = Rated()
    optimize(made, config, 5, first_state(made, config, 5))
    draws = [np.random.default_rng([5, step]).choice(3, 1, replace=False).tolist() for step in (1, 2, 3)]
    assert [call["networks"] for call in made.calls] == [one for one in draws for _ in range(2)]
    assert len({tuple(one) for one in draws}) > 1


def test_mutations_go_on_from_a_worse_sequence() -> None:
    """The best sequence of all is the design, as in ColabDesign."""

    class Worse(Rated):
        """Evaluator that rates each sequence lower than the one before it."""

        def __call__(self, *arguments: Any, **named: Any) -> Evaluation:
            return replace(super().__call__(*arguments, **named), loss=float(len(self.calls)))

    config = DesignConfig(soft_steps=0, temperature_steps=0, hard_steps=1, mutation_steps=4, tries=1)
    made: Any = Worse()
    state = optimize(made, config, 2, first_state(made, config, 2))
    sequences = [row["sequence"] for row in state.log]
    assert [sum(a != b for a, b in zip(*two, strict=True)) for two in pairwise(sequences)] == [1] * 4
    assert final_parameters(made, state) == sequences[0]


@pytest.mark.parametrize("is_profile", [False, True])
def test_mutated_residues_are_drawn_evenly_or_by_the_profile(is_profile: bool) -> None:
    """By the logits at the end of the soft steps, among other residues that are allowed."""
    config = DesignConfig(
        soft_steps=2,
        temperature_steps=1,
        hard_steps=0,
        mutation_steps=1,
        tries=60,
        profile_mutations=is_profile,
    )
    made: Any = Rated()
    made.allowed[[rc.restype_order["A"], rc.restype_order["C"]]] = False
    seen: list[torch.Tensor] = []
    logits = torch.zeros(10, 20)
    for letter, value in (("C", 30.0), ("D", 20.0), ("E", 20.0), ("W", -20.0)):
        logits[:, rc.restype_order[letter]] = value
    optimize(made, config, 0, first_state(made, config, 0), lambda one: seen.append(one.profile.clone()))
    assert torch.equal(seen[2], seen[1])
    assert not torch.equal(seen[1], seen[0])
    state = first_state(made, config, 0)
    state.step, state.profile = 3, logits
    state.log = [{"stage": "temperature", "loss": 0.0, "designed_plddt": 80.0, "sequence": "W" * 10}]
    made.calls.clear()
    optimize(made, config, 0, state)
    drawn = Counter(letter for call in made.calls for letter in call["letters"] if letter != "W")
    assert drawn.total() == 60
    assert drawn.keys() <= (set("DE") if is_profile else set(rc.restypes) - set("AC"))
    assert (len(drawn) == 2) == is_profile
    if is_profile:
        assert 15 < drawn["D"] < 45


def _mutated_places(plddt: np.ndarray) -> list[int]:
    """Residues that 40 rounds of one mutation change."""
    config = DesignConfig(soft_steps=0, temperature_steps=0, hard_steps=0, mutation_steps=1, tries=1)
    places = []
    for seed in range(40):
        made: Any = Rated()
        state = first_state(made, config, seed)
        state.plddt, before = plddt, decode_sequence(state.parameters)
        optimize(made, config, seed, state)
        after = decode_sequence(state.parameters)
        places += [i for i in range(10) if before[i] != after[i]]
    assert len(places) == 40
    return places


def test_adam_is_pytorchs() -> None:
    """With gradients whose length is the square root of the number of residues."""
    config = DesignConfig(optimizer="adam", learning_rate=0.1)
    made: Any = Rated()
    state = first_state(made, config, 0)
    parameter = torch.nn.Parameter(state.parameters.clone())
    adam = torch.optim.Adam([parameter], lr=0.1 * 0.5)
    for step in range(3):
        gradient = torch.randn(10, 20, generator=torch.Generator().manual_seed(step))
        gradient[0] = 0.0
        _descend(state, gradient, config, 0.5)
        state.step += 1
        parameter.grad = gradient * 9**0.5 / gradient.norm()
        adam.step()
        torch.testing.assert_close(state.parameters, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_trajectory_is_saved_said_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth step and the last; a stopped design begins after its last saved step."""
    config = DesignConfig(soft_steps=12, temperature_steps=0, hard_steps=3, give_up_below=0.0)
    lines: list[str] = []
    optimizer = SequenceOptimizer(
        [], config, InferConfig(), torch.device("cpu"), None, overwrite=False, say=lines.append
    )
    made: Any = Rated()
    monkeypatch.setattr(optimizer, "evaluator", lambda task: made)
    design = optimizer.design(made.task, 7, tmp_path)
    name = "hallucinate_seed_007"
    assert lines == [
        f"{name}: step 10 of 15 (soft), loss 90.000, pLDDT 80.0",
        f"{name}: step 15 of 15 (hard), loss 85.000, pLDDT 80.0",
    ]
    rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(n, 100.0 - n) for n in range(1, 16)]
    assert {path.name.removeprefix(name) for path in tmp_path.iterdir()} >= {
        ".safetensors", ".jsonl", ".pdb", "_design.pdb",
    }  # fmt: skip
    assert design.name == name
    assert design.parameters == rows[-1]["sequence"]
    lines.clear()
    again = optimizer.design(made.task, 7, tmp_path)
    assert lines == [f"{name}: continues after step 15"]
    assert again.sequences == design.sequences
    assert len(made.calls) == 15


def test_the_share_of_strands_is_that_of_the_designed_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chain B of ten residues, of which three are in strands, next to a chain of strands alone."""
    task = hallucination(10, copies=2)
    task = replace(task, own_chains=(1,))
    seen: list[Any] = []

    def assign(positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, chain: np.ndarray) -> str:
        seen.append((rc.aatype_to_sequence(aatype), mask, chain.tolist()))
        return "E" * 10 + "LLEELHHHEL"

    monkeypatch.setattr("fastfold.products.design.optimize.assign_secondary_structure", assign)
    letters = "ACDEFGHIKL"
    evaluation: Any = SimpleNamespace(positions=np.zeros((20, 37, 3)), logits=encode_sequence(letters))
    assert strand_share(task, evaluation) == pytest.approx(0.3)
    ((sequence, mask, chain),) = seen
    assert (sequence, chain) == (letters * 2, [0] * 10 + [1] * 10)
    assert mask[0].sum() == 5  # alanine


@pytest.mark.parametrize(
    ("text", "least", "most", "numbers"),
    [("3", 1, 2, (3,)), (" 3 , 0", 1, 2, (3, 0)), ("1,2,3", 3, 3, (1, 2, 3))],
)
def test_counts_are_whole_numbers_with_commas(
    text: str, least: int, most: int, numbers: tuple[int, ...]
) -> None:
    assert parse_counts(text, least=least, most=most) == numbers


@pytest.mark.parametrize("text", ["", "1", "1,2,3,4", "1,,3", "1,-2,3", "1,2.0,3", "1,x,3", "1,٣,3"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected 3 whole numbers with commas, found"):
        parse_counts(text, least=3, most=3)
