"""What a run continues as: the same run, or one whose changes were accepted."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from fastfold.errors import ConfigError, OutputError
from fastfold.training.checkpoint.storage import Storage
from fastfold.training.lifecycle.process import OWNER
from fastfold.training.logging.loggers import read_json_lines
from tests.training.test_train import BARE, here

ONCE = ["trainer.steps=2", "data.workers=0", *BARE]


def test_another_run_neither_continues_one_nor_replaces_it(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert here(data_folder, out, *ONCE)
    assert (out / OWNER).is_file()
    assert [path.name for path in (out / "configs").iterdir()] == ["0001.yaml"]
    settings, files = (out / "config.yaml").read_text(), sorted((out / "checkpoints").rglob("*"))

    with pytest.raises(ConfigError, match=r"trainer\.seed: 0 -> 5.*trainer\.accept_changes=true"):
        here(data_folder, out, *ONCE, "trainer.seed=5")
    with pytest.raises(ConfigError, match=r"has checkpoints of a run; to start again, remove them"):
        here(data_folder, out, *ONCE, "trainer.resume=never", "trainer.seed=9")
    assert (out / "config.yaml").read_text() == settings
    assert sorted((out / "checkpoints").rglob("*")) == files

    capsys.readouterr()
    assert here(data_folder, out, *ONCE, "trainer.seed=5", "optim.lr=1e-4", "trainer.accept_changes=true")
    printed = capsys.readouterr().err
    assert "changed since the last start: optim.lr: 0.001 -> 0.0001" in printed
    assert "changed since the last start: trainer.seed: 0 -> 5" in printed
    assert len(list((out / "configs").iterdir())) == 2
    events = [
        (entry["step"], entry["event"])
        for entry in read_json_lines(out / "metrics.jsonl")
        if "event" in entry
    ]
    assert events == [
        (2, f"resuming from {out / 'checkpoints' / 'step_00000002'} after step 2"),
        (2, "changed since the last start: optim.lr: 0.001 -> 0.0001"),
        (2, "changed since the last start: trainer.seed: 0 -> 5"),
        (
            2,
            "trainer.steps=2 was reached before: nothing is trained, weights and report are written again; set more "
            "steps to go on",
        ),
    ]


def test_a_run_whose_last_checkpoint_fails_says_so_in_the_end(
    data_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weights are there, but it is not finished: the same command does the last steps again."""
    out = tmp_path / "run"
    create = Storage.create

    def full(storage: Storage, path: str) -> AbstractContextManager[BinaryIO]:
        if "step_00000003" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(storage, path)

    steps = ["trainer.steps=3", "trainer.checkpoint_every=1", *ONCE[1:]]
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "create", full)
        with pytest.raises(OutputError, match=r"No space left on device.*step_00000002\. Fix it and run"):
            here(data_folder, out, *steps)
    assert (out / "mini.safetensors").is_file()
    (event,) = [entry for entry in read_json_lines(out / "metrics.jsonl") if "event" in entry]
    assert "No space left on device" in event["event"]
    assert here(data_folder, out, *steps)
    assert "after step 2" in capsys.readouterr().err


@pytest.mark.long
def test_checkpoints_may_lie_elsewhere(data_folder: Path, tmp_path: Path) -> None:
    out, place = tmp_path / "run", f"file://{tmp_path}/elsewhere"
    elsewhere = [f"trainer.checkpoint_dir={place}", "trainer.keep_last=1", "trainer.keep_every=2", *ONCE[1:]]
    assert here(data_folder, out, *elsewhere, "trainer.steps=5", "trainer.checkpoint_every=1")
    kept = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    assert kept == ["step_00000002", "step_00000004", "step_00000005"]
    assert not (out / "checkpoints").exists()
    assert here(data_folder, out, *elsewhere, "trainer.steps=6")
    events = [entry["event"] for entry in read_json_lines(out / "metrics.jsonl") if "event" in entry]
    assert events[0] == f"resuming from {place}/step_00000005 after step 5"

    # From another folder it is the same run, whose settings the checkpoint has.
    with pytest.raises(ConfigError, match=r"trainer\.seed: 0 -> 5.*trainer\.accept_changes=true"):
        here(data_folder, tmp_path / "again", *elsewhere, "trainer.steps=7", "trainer.seed=5")
    assert here(data_folder, tmp_path / "again", *elsewhere, "trainer.steps=7", "optim.lr=2e-3")
    events = [
        entry["event"] for entry in read_json_lines(tmp_path / "again" / "metrics.jsonl") if "event" in entry
    ]
    assert events[0] == f"resuming from {place}/step_00000006 after step 6"
    assert "changed since the last start: optim.lr: 0.001 -> 0.002" in events
