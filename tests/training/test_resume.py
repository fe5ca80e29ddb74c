"""What a run continues as: the same run, or one whose changes were accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import ConfigError
from fastfold.training.lifecycle.ownership import OWNER
from fastfold.training.logging.loggers import read_json_lines
from tests.training.test_train import here

ONCE = ["trainer.steps=2", "data.workers=0", "optim.batch_size=1", "data.max_recycles=0"]


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
    with pytest.raises(ConfigError, match=r"has checkpoints of a run; to start anew, remove them"):
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
        (2, f"continues from {out / 'checkpoints' / 'step_00000002'}, after step 2"),
        (2, "changed since the last start: optim.lr: 0.001 -> 0.0001"),
        (2, "changed since the last start: trainer.seed: 0 -> 5"),
    ]
