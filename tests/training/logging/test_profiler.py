"""A few steps leave a trace that Chrome reads; no trace is missed silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.logging.profiling import StepProfiler
from tests.training.test_train import here


def names(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}


def profiled(folder: Path, steps: int, of_all: int) -> list[str]:
    """Steps whose operators tell their numbers."""
    said: list[str] = []
    with StepProfiler(folder, steps, said.append) as profiler:
        for number in range(1, of_all + 1):
            with torch.profiler.record_function(f"work of step {number}"):
                torch.ones(3).sum()
            profiler.step(number)
    return said


def test_the_first_steps_are_left_out(tmp_path: Path):
    (said,) = profiled(tmp_path / "profile", 2, 7)
    trace = tmp_path / "profile" / "until_step_00000004.json"
    assert str(trace) in said
    assert {name for name in names(trace) if name.startswith("work of")} == {
        "work of step 3",
        "work of step 4",
    }


def test_a_run_that_ends_before_leaves_what_there_is(tmp_path: Path):
    profiled(tmp_path, 5, 3)
    assert "work of step 3" in names(tmp_path / "until_step_00000003.json")


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").touch()
    (said,) = profiled(tmp_path / "file", 1, 4)
    assert said.startswith("no profile: cannot use output folder")


def test_no_steps_no_trace(tmp_path: Path):
    assert profiled(tmp_path / "profile", 0, 4) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [2])
@pytest.mark.slow
def test_a_run_profiles_its_steps(data_folder: Path, tmp_path: Path, steps: int):
    out = tmp_path / "run"
    assert here(data_folder, out, "trainer.steps=5", f"trainer.profile_steps={steps}", "data.max_recycles=0")
    trace = out / "profile" / "until_step_00000004.json"
    assert any("aten::" in name for name in names(trace))
    (event,) = [e["event"] for e in read_json_lines(out / "metrics.jsonl") if "event" in e]
    assert str(trace) in event
