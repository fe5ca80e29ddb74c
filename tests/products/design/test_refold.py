"""Folds of designs in a folder that has others: of other settings, or of other sequences under the same name."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.products.design import DesignConfig, DesignRequest, hallucination, run_designs
from fastfold.products.design.results.program import ProgramSequence, SequenceProgram
from fastfold.products.design.results.redesign import Redesign
from fastfold.products.design.results.refold import _take_names

STEPS = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=0)


def made_by(request: DesignRequest) -> dict[str, dict[str, str]]:
    """Rows of the table of a run by their names."""
    run_designs(request, say=lambda line: None)
    with (request.output / "designs.tsv").open() as file:
        return {row["name"]: row for row in csv.DictReader(file, delimiter="\t")}


def mean_plddt(scores: Path) -> float:
    return float(json.loads(scores.read_text())["mean_plddt"])


@pytest.fixture
def request_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DesignRequest:
    """A design that two seeds fold, without pages, which take most of the time."""
    monkeypatch.setattr("fastfold.inference.runner.write_report", lambda *_, **__: None)
    monkeypatch.setattr("fastfold.products.design.run.write_report", lambda *_, **__: None)
    infer = InferConfig(num_recycles=0, seeds=(0, 1), plots=False)
    return DesignRequest(hallucination(12), tmp_path / "out", config=STEPS, infer=infer)


def test_folds_of_other_settings_do_not_count(request_of_two: DesignRequest) -> None:
    name = "hallucinate_seed_000"
    assert made_by(request_of_two)[name]["folds"] == "2"
    for seed in (0, 1):
        one = replace(request_of_two, infer=replace(request_of_two.infer, seeds=(seed,)))
        (row,) = made_by(one).values()
        (path,) = one.output.glob(f"{name}_rank_*_seed_{seed}_scores.json")
        assert row["folds"] == "1"
        assert float(row["plddt"]) == pytest.approx(mean_plddt(path), abs=0.02)


@pytest.mark.long
def test_a_design_that_starts_again_replaces_the_folds_of_the_earlier_one(
    request_of_two: DesignRequest,
) -> None:
    made_by(request_of_two)
    longer = replace(request_of_two, task=hallucination(14), overwrite=True)
    (row,) = made_by(longer).values()
    assert (len(row["sequence"]), row["folds"]) == (14, "2")
    scores = [json.loads(path.read_text()) for path in longer.output.glob("*_scores.json")]
    assert [one["sequences"] for one in scores] == [[row["sequence"]]] * 2


@pytest.mark.long
def test_sequences_of_another_program_have_their_own_folds(
    request_of_two: DesignRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sequences under the same names are refused, or replace the earlier ones."""
    letters = "ACDEFGHIKLMN"
    monkeypatch.setattr(
        SequenceProgram,
        "sequences",
        lambda program, *_, **__: [
            ProgramSequence(letters if program.temperature == 0.1 else letters[::-1], None)
        ],
    )
    program = SequenceProgram("echo {pdb} {out} {temperature}")
    first = replace(request_of_two, redesign=Redesign(program))
    name = "hallucinate_seed_000_mpnn_1"
    assert made_by(first)[name]["sequence"] == letters
    second = replace(first, redesign=Redesign(replace(program, temperature=0.5)))
    with pytest.raises(ConfigError, match=rf"has folds of another sequence named {name}; choose another"):
        made_by(second)
    row = made_by(replace(second, overwrite=True))[name]
    assert (row["sequence"], row["folds"]) == (letters[::-1], "2")
    (best,) = first.output.glob(f"{name}_rank_001_*_scores.json")
    assert float(row["plddt"]) == pytest.approx(mean_plddt(best), abs=0.02)


@pytest.mark.parametrize("overwrite", [False, True])
def test_names_of_folds_of_other_sequences_are_taken_with_overwrite_alone(overwrite: bool) -> None:
    released: list[str] = []
    others = {"b": SimpleNamespace(release=lambda: released.append("b"))}
    folder: Any = SimpleNamespace(path="out", other_results=lambda target: others.get(target.name))
    targets: Any = [SimpleNamespace(name=name) for name in "abc"]
    if overwrite:
        _take_names(folder, targets, overwrite=True)
    else:
        with pytest.raises(ConfigError, match="out has folds of another sequence named b; choose another"):
            _take_names(folder, targets, overwrite=False)
    assert released == ["b"] * overwrite
