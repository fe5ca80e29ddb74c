"""The first hour on a GPU: a step that fails or hangs does not stop the others, and the report says what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import run, steps
from benchmarks.gpu.steps import Step, all_steps


def python(name: str, code: str, **options: float) -> Step:
    return Step(name, ["-c", code], **options)  # type: ignore[arg-type]


def test_all_steps_run_whatever_happens_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        python("bad", "import sys; print('it broke'); sys.exit(3)"),
        python("slow", "import time; print('begun', flush=True); time.sleep(60)", minutes=0.01),
        python("absent", "pass", gpus=99),
        Step("tool", ["no-such-program"], program="no-such-program"),
        python("good", "print('fine')"),
    ]
    monkeypatch.setattr(run, "all_steps", lambda device, scratch: made)
    assert run.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "gpu_cpu_a_trial.json").read_text())
    states = {step["name"]: step["state"] for step in record["steps"]}
    assert states == {
        "bad": "failed",
        "slow": "timed out",
        "absent": "not run",
        "tool": "not run",
        "good": "passed",
    }
    text = (tmp_path / "gpu_cpu_a_trial.md").read_text()
    assert "it broke" in text
    assert "begun" in text
    assert "needs 99 CUDA devices" in text
    assert "fine" not in text
    assert run.main(["--device", "cpu", "--out", str(tmp_path), "--steps", "good"]) == 0


def test_an_unknown_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(["--device", "cpu", "--out", str(tmp_path), "--steps", "coffee"])
    assert stop.value.code == 2
    assert "no step 'coffee'" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_script_of_a_step_exists(device: str, tmp_path: Path) -> None:
    found = all_steps(device, tmp_path)
    assert len({step.name for step in found}) == len(found)
    for step in found:
        for argument in step.command:
            if argument.endswith(".py"):
                assert (steps.REPOSITORY / argument).is_file(), argument


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_marks_what_needs_a_device_as_not_run(tmp_path: Path) -> None:
    lacking = [step.name for step in all_steps("cpu", tmp_path) if step.missing()]
    assert {"tests of kernels", "CUDA graphs", "NCCL"} <= set(lacking)
    assert not {"environment", "kernels once, fp32", "train and resume"} & set(lacking)


@pytest.mark.slow
def test_the_whole_program_passes_on_a_cpu(tmp_path: Path) -> None:
    assert run.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
