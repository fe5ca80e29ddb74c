"""Batched folds: equal to single folds, independent of the other targets, within the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.targets import Target, target_from_sequence
from fastfold.data.templates.whole.given import GivenStructure
from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.api import load_model
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.folding import batch as batch_module
from fastfold.inference.folding.batch import (
    Answer,
    BatchFolder,
    Request,
    batch_plan,
    group_by_length,
    pad_features,
)
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.planning.fit import FoldMemory
from fastfold.memory import BudgetError
from tests.helpers.command_line import CommandLine, small_model
from tests.helpers.networks import random_model

CPU = torch.device("cpu")
PEPTIDES = ("MKTAYIAKQRQISFVK", "GSHMAWLPEDK", "ACDEFGHIKLMNPQ")


@pytest.fixture(scope="module")
def mini() -> AlphaFold:
    """The first two blocks of the network that ships, with few steps of its descent."""
    model = load_model("mini", device="cpu").double()
    model.evoformer.blocks = model.evoformer.blocks[:2]
    model.config.model.embeddings_and_evoformer.evoformer_num_block = 2
    descent = model.config.model.heads.structure_module.distogram_descent
    descent.steps = descent.last_steps = 10
    return model


@pytest.fixture(scope="module")
def multimer() -> AlphaFold:
    return random_model(small_model("model_1_multimer_v3").config, dtype=torch.float64)


def predictors(
    model: AlphaFold, sequences: Sequence[str] = PEPTIDES, **settings: Any
) -> list[TargetPredictor]:
    targets: list[Target] = [target_from_sequence(s, f"t{i}") for i, s in enumerate(sequences)]
    config = InferConfig(**{"device": "cpu", "num_recycles": 1, **settings})
    return [
        TargetPredictor(t, [model], [([], [])] * len(t.chains), config, device=CPU, say=print)
        for t in targets
    ]


@pytest.fixture(scope="module")
def alone(mini: AlphaFold) -> list[Prediction]:
    """The single folds of :data:`PEPTIDES` with the seed 3."""
    return [one.predict(mini, 3) for one in predictors(mini)]


def folded(found: Answer | Exception) -> Prediction:
    assert isinstance(found, Answer), found
    return found.prediction


def check_equal(found: Prediction, wanted: Prediction) -> None:
    np.testing.assert_allclose(found.atom_positions, wanted.atom_positions, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.atom_mask, wanted.atom_mask)
    np.testing.assert_allclose(found.plddt, wanted.plddt, rtol=0, atol=1e-4)
    assert (found.pae is None) == (wanted.pae is None)
    if wanted.pae is not None and found.pae is not None:
        np.testing.assert_allclose(found.pae, wanted.pae, rtol=0, atol=1e-4)
        assert found.max_pae == wanted.max_pae
    for score in ("ptm", "iptm"):
        assert getattr(found, score) == (pytest.approx(getattr(wanted, score), abs=1e-6))
    assert found.num_recycles == wanted.num_recycles
    assert (found.name, found.seed, found.sequences) == (wanted.name, wanted.seed, wanted.sequences)


def predict(model: AlphaFold, made: Sequence[TargetPredictor], seed: int = 3) -> list[Answer | Exception]:
    return BatchFolder(print).predict([Request(one, model, seed) for one in made])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (1, 2, 0)])
def test_a_batch_gives_the_results_of_single_folds_in_any_company(
    mini: AlphaFold, alone: list[Prediction], order: tuple[int, ...]
) -> None:
    made = predictors(mini)
    answers = predict(mini, [made[i] for i in order])
    for i, answer in zip(order, answers, strict=True):
        assert isinstance(answer, Answer)
        assert answer.shared == len(order)
        check_equal(answer.prediction, alone[i])


def test_complexes_of_a_multimer_network_share_passes(multimer: AlphaFold) -> None:
    made = predictors(multimer, ("MKTAYIAKQR:GSHMAWLPE", "GSHMAWL:GSHMAWL:ACDE", "MKTAYIAKQRGS"))
    for one, answer in zip(made, predict(multimer, made), strict=True):
        wanted, found = one.predict(multimer, 3), folded(answer)
        check_equal(found, wanted)
        if wanted.chain_confidence is not None and found.chain_confidence is not None:
            np.testing.assert_allclose(found.chain_confidence.iptm, wanted.chain_confidence.iptm, atol=1e-6)


@pytest.mark.long
def test_each_target_stops_recycling_as_it_does_alone(mini: AlphaFold) -> None:
    made = predictors(mini, num_recycles=4, recycle_tolerance=2.2, save_recycles=True)
    wanted = [one.predict(mini, 0) for one in made]
    assert len({one.num_recycles for one in wanted}) > 1, "the targets should stop at different passes"
    for one, answer in zip(wanted, predict(mini, made, seed=0), strict=True):
        check_equal(folded(answer), one)
        assert len(folded(answer).recycles) == len(one.recycles)
        for found, kept in zip(folded(answer).recycles, one.recycles, strict=True):
            np.testing.assert_allclose(found.atom_positions, kept.atom_positions, rtol=0, atol=1e-5)


def test_representations_and_distograms_are_those_of_each_target(mini: AlphaFold) -> None:
    made = predictors(mini, num_recycles=2, save_representations=True, save_distogram=True, num_ensemble=2)
    for one, answer in zip(made, predict(mini, made), strict=True):
        wanted, found = one.predict(mini, 3), folded(answer)
        assert wanted.representations is not None
        assert found.representations is not None
        for key, value in wanted.representations.items():
            np.testing.assert_allclose(found.representations[key], value, rtol=1e-5, atol=1e-5)
        assert wanted.distogram is not None
        assert found.distogram is not None
        np.testing.assert_array_equal(found.distogram["probabilities"], wanted.distogram["probabilities"])


def test_a_failing_target_does_not_fail_its_batch(
    mini: AlphaFold, alone: list[Prediction], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = predictors(mini)

    def broken(*_: Any) -> None:
        raise ValueError("broken features")

    monkeypatch.setattr(made[1], "target_fold", broken)
    first, second, third = predict(mini, made)
    assert isinstance(second, ValueError)
    check_equal(folded(first), alone[0])
    check_equal(folded(third), alone[2])


def test_a_batch_that_runs_out_of_memory_is_halved(mini: AlphaFold, monkeypatch: pytest.MonkeyPatch) -> None:
    made, run, sizes = predictors(mini), batch_module.run_batch, []

    def limited(model: AlphaFold, targets: Sequence[Any], **options: Any) -> Any:
        sizes.append(len(targets))
        if len(targets) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return run(model, targets, **options)

    monkeypatch.setattr(batch_module, "run_batch", limited)
    said: list[str] = []
    answers = BatchFolder(said.append).predict([Request(one, mini, 3) for one in made])
    assert sizes == [3, 2]
    assert [a.shared for a in answers if isinstance(a, Answer)] == [2, 2, 1]
    assert "out of memory for 3 targets at once" in said[0]


def test_batches_are_as_large_as_the_memory_allows(mini: AlphaFold, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = predictors(mini)[0].fit(mini).plan.peak

    def limited(*_: Any, **__: Any) -> FoldMemory:
        return FoldMemory(free=int(2.1 * peak), host=0, disk=0)

    monkeypatch.setattr(FoldMemory, "here", limited)
    answers = predict(mini, predictors(mini))
    assert [a.shared for a in answers if isinstance(a, Answer)] == [2, 2, 1]


def test_dropout_is_refused_once_and_folds_alone(mini: AlphaFold) -> None:
    made = predictors(mini, dropout=True, num_recycles=0)
    said: list[str] = []
    folder = BatchFolder(said.append)
    requests = [Request(one, mini, 3) for one in made[:2]]
    for answers in (folder.predict(requests), folder.predict(requests)):
        assert [a.shared for a in answers if isinstance(a, Answer)] == [1, 1]
    assert said == ["warning: not batched: dropout folds targets one by one"]


def test_samples_fold_one_by_one_and_are_those_of_single_folds(mini: AlphaFold) -> None:
    sampling = fastfold.Sampling("columns", number=2)
    sequences = {"a": PEPTIDES[0], "b": PEPTIDES[0][::-1]}
    msas: dict[str, Any] = {name: [sequence, "GG" + sequence[2:]] for name, sequence in sequences.items()}
    made = [
        fastfold.predict_many(sequences, mini, msas=msas, batch=batch, num_recycles=0, sample=sampling)
        for batch in (1, 2)
    ]
    assert {name: [one.sample_label for one in many] for name, many in made[1].items()} == {
        name: [one.sample_label for one in many] for name, many in made[0].items()
    }
    for name, wanted in made[0].items():
        assert len(wanted) == 2
        for prediction, alone in zip(made[1][name], wanted, strict=True):
            check_equal(prediction, alone)


@pytest.mark.parametrize("setting", ["sample", "embed", "given"])
def test_kinds_of_runs_that_fold_targets_one_by_one(mini: AlphaFold, setting: str) -> None:
    (one,) = predictors(mini, PEPTIDES[:1])
    assert not one.reason_alone(mini)
    if setting == "given":
        one.target = replace(one.target, scored_structure=GivenStructure(Path("a.pdb"), "initial_guess"))
    else:
        value = fastfold.Sampling("columns") if setting == "sample" else EmbedConfig()
        one.config = replace(one.config, **{setting: value})
    assert setting in one.reason_alone(mini)
    assert "one by one" in one.reason_alone(mini)


def test_groups_have_similar_lengths_and_keep_the_order_of_targets() -> None:
    assert group_by_length([100, 40, 102, 41, 42, 300], 2, CPU) == [[0, 2], [1, 3], [4], [5]]
    assert group_by_length([300, 40, 302, 41], "auto", CPU) == [[0], [1, 3], [2]]
    assert group_by_length([], "auto", CPU) == []


def test_padding_is_zero_on_every_axis() -> None:
    samples = [{"x": torch.ones(1, 2)}, {"x": torch.full((2, 1), 2.0)}]
    assert pad_features(samples)["x"].tolist() == [[[1, 1], [0, 0]], [[2, 0], [2, 0]]]


def test_predict_many_returns_single_folds_in_order(mini: AlphaFold) -> None:
    sequences = {"long": PEPTIDES[0], "other": "MK", "like long": PEPTIDES[2]}
    found = fastfold.predict_many(sequences, mini, batch=2, num_recycles=0, seeds=[0, 1])
    assert list(found) == list(sequences)
    for name, one in fastfold.predict_many(sequences, mini, num_recycles=0, seeds=[0, 1]).items():
        for prediction, wanted in zip(found[name], one, strict=True):
            check_equal(prediction, wanted)


def test_infer_writes_batched_targets_like_single_ones(cli: CommandLine) -> None:
    records = {"a": PEPTIDES[2], "b": PEPTIDES[2][::-1], "c": "MKTAYIAK", "d": PEPTIDES[2]}
    fasta = cli.fasta(records)
    assert cli.infer(fasta).code == 0
    single = {name: cli.scores(name) for name in records}
    batched = cli.infer(fasta, "--overwrite", "--batch", "3")
    assert batched.code == 0, batched.err
    assert "4 folded" in batched.out
    assert {name: cli.config(name).get("batch") for name in records} == {"a": 3, "b": 3, "c": None, "d": 3}
    for name, wanted in single.items():
        np.testing.assert_allclose(cli.scores(name)["plddt"], wanted["plddt"], rtol=0, atol=0.02)
    assert "4 finished before" in cli.infer(fasta, "--batch", "auto").out


def test_infer_refuses_an_invalid_batch(cli: CommandLine) -> None:
    assert "expected auto or a number" in cli.infer(cli.fasta({"a": "MK"}), "--batch", "0").err


def test_a_target_that_fails_in_a_batch_is_named(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = TargetPredictor.target_fold

    def broken(self: TargetPredictor, *arguments: Any) -> Any:
        if self.target.name == "bad":
            raise InputError("broken features", record="bad")
        return made(self, *arguments)

    monkeypatch.setattr(TargetPredictor, "target_fold", broken)
    records = {"good": PEPTIDES[2], "bad": PEPTIDES[2], "fine": PEPTIDES[2]}
    found = cli.infer(cli.fasta(records), "--batch", "3")
    assert found.code == 1
    assert "2 folded, 1 failed" in found.out
    assert "error: record 'bad': broken features" in found.err


@pytest.mark.parametrize(
    ("rows", "templates", "expected"),
    [((5, 9), (1, 4), (9, 4)), ((5, None), (4, 1), (None, 4)), ((9, 5), (None, None), (9, None))],
)
def test_targets_are_planned_as_the_largest_of_them(
    rows: tuple[int | None, ...], templates: tuple[int | None, ...], expected: tuple[int | None, ...]
) -> None:
    """The memory is divided; without the rows of one target the plan is that of any number."""

    @dataclass(frozen=True)
    class Planner:
        rows: int | None
        templates: int | None

        def plan(self, residues: int, budget: int) -> SimpleNamespace:
            if budget < 100:
                raise BudgetError("too little", 100)
            asked.append((self.rows, self.templates, residues, budget))
            return SimpleNamespace(blocks=budget < 200)

    def plan(*budgets: int) -> Any:
        fits = [
            SimpleNamespace(planner=Planner(*sizes), residues=residues, budget=budget)
            for *sizes, residues, budget in zip(rows, templates, (30, 20), budgets, strict=True)
        ]
        requests = [
            SimpleNamespace(model=fit, predictor=SimpleNamespace(fit=lambda model: model)) for fit in fits
        ]
        return batch_plan(requests)  # type: ignore[arg-type]

    asked: list[tuple[int | None, int | None, int, int]] = []
    assert plan(900, 401).blocks is False
    assert asked == [(*expected, 30, 200)]
    assert plan(900, 300) is None
    assert plan(150, 900) is None
