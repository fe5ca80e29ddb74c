"""Log of a run: its events, the file of bad samples, and validations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.parallel import ParallelPlan, init_distributed
from fastfold.training.compose import compose_config
from fastfold.training.lifecycle.settings_history import Change
from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.logging.run_log import TrainingLog
from fastfold.training.report.report import write_report
from fastfold.training.validation import ChainScore


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TrainingLog]:
    config = compose_config([f"trainer.out={tmp_path}", "data.directory=none", "trainer.steps=9"])
    with init_distributed(ParallelPlan(), torch.device("cpu")) as context:
        yield TrainingLog(config, context)


def test_bad_samples_are_listed_by_name_once_and_the_list_ends_with_them(
    log: TrainingLog, tmp_path: Path
) -> None:
    log.quarantine([("b", "no\nCA"), ("a", "early")], [("a", "late")])
    assert (tmp_path / "quarantine.tsv").read_text() == "a\tlate\nb\tno CA\n"
    log.quarantine([], [])
    assert not (tmp_path / "quarantine.tsv").exists()


@pytest.mark.parametrize("step", [8, 9])
def test_a_resumed_run_says_what_differs(log: TrainingLog, tmp_path: Path, step: int) -> None:
    log.resumed(step, "place", 2, [Change("optim.lr", 1, 2)], 9)
    events = [entry["event"] for entry in read_json_lines(tmp_path / "metrics.jsonl")]
    assert events[:3] == [
        f"resuming from place after step {step}",
        "retrying 2 quarantined samples when they are drawn",
        "changed since the last start: optim.lr: 1 -> 2",
    ]
    assert [text.startswith("trainer.steps=9 was reached before") for text in events[3:]] == [True] * (
        step == 9
    )


def test_a_validation_is_logged_as_means_and_chains(log: TrainingLog, tmp_path: Path) -> None:
    scores = [
        ChainScore(name, 3, lddt, 0.5, 0.25, np.array([lddt]), np.array([0.12345]))
        for name, lddt in (("a", 0.2), ("b", 0.4))
    ]
    log.validation(4, [], ["c: lost"])
    assert not (tmp_path / "validation.jsonl").exists()
    log.validation(4, scores, [])
    (line,) = map(json.loads, (tmp_path / "validation.jsonl").read_text().splitlines())
    assert (line["step"], line["valid_tm_score"], [chain["id"] for chain in line["chains"]]) == (
        4,
        0.5,
        ["a", "b"],
    )
    assert line["valid_lddt_ca"] == pytest.approx(0.3)
    assert line["chains"][0]["predicted"] == [0.123]
    log.resume_from(4)
    assert (tmp_path / "validation.jsonl").read_text() == ""


def test_a_validation_that_is_not_finite_is_valid_json_and_has_a_report(
    log: TrainingLog, tmp_path: Path
) -> None:
    nan = float("nan")
    lost = ChainScore("lost", 2, 0.0, 0.0, nan, np.zeros(2), np.array([nan, nan]))
    good = ChainScore("good", 2, 0.5, 0.5, 0.75, np.array([0.5, 0.6]), np.array([0.7, 0.8]))
    log.validation(4, [lost, good], [])
    line = json.loads((tmp_path / "validation.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["valid_plddt"] is None
    assert [chain["predicted"] for chain in line["chains"]] == [[None, None], [0.7, 0.8]]
    page = write_report(tmp_path).read_text()
    assert "| predicted lDDT | 0.750 | 0.750 | 0.750 | 0.750 |" in page
    assert "| lost | 2 | 0.000 | 0.000 |  |" in page
    assert "Predicted against true lDDT-CA of 2 residues" in page
