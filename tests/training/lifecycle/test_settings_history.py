"""What changed since the last start of a run is known, and what makes it another run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import ConfigError
from fastfold.training.config import TrainConfig
from fastfold.training.lifecycle.settings_history import (
    CURRENT,
    FOLDER,
    changes_since,
    record_start,
    refuse_decisive,
)
from tests.helpers.compositions import compose_run

KEY = "model.overrides.model.embeddings_and_evoformer"


def config(*overrides: str) -> TrainConfig:
    return compose_run(["data.directory=d", "trainer.out=o"], *overrides)


def changes(tmp_path: Path, *overrides: str) -> list[str]:
    return [str(change) for change in changes_since(tmp_path, config(*overrides))]


def test_a_first_start_has_no_changes(tmp_path: Path) -> None:
    assert changes(tmp_path) == []


def test_the_same_settings_have_none_either(tmp_path: Path) -> None:
    record_start(tmp_path, config("data.oversample={a: 2}"))
    assert changes(tmp_path, "data.oversample={a: 2}") == []
    assert (
        changes(tmp_path, "data.oversample={a: 2}", "trainer.resume=never", "trainer.accept_changes=true")
        == []
    )


@pytest.mark.parametrize(
    ("override", "change", "decisive"),
    [
        ("optim.lr=0.5", "optim.lr: 0.001 -> 0.5", False),
        ("trainer.steps=7", "trainer.steps: 78000 -> 7", False),
        ("data.workers=1", "data.workers: 4 -> 1", False),
        ("data.cache=c", "data.cache: null -> c", False),
        ("trainer.seed=3", "trainer.seed: 0 -> 3", True),
        ("data.crop_size=9", "data.crop_size: 256 -> 9", True),
        ("data.directory=e", "data.directory: d -> e", True),
        ("model.preset=model_2_ptm", "model.preset: model_1_ptm -> model_2_ptm", True),
        ("model.weights=w.npz", "model.weights: null -> w.npz", True),
    ],
)
def test_changes(tmp_path: Path, override: str, change: str, decisive: bool) -> None:
    record_start(tmp_path, config())
    found = changes_since(tmp_path, config(override))
    assert [str(one) for one in found] == [change]
    if not decisive:
        refuse_decisive(found)
        return
    with pytest.raises(ConfigError, match=r"trainer\.accept_changes=true") as refused:
        refuse_decisive(found)
    assert change in str(refused.value)


def test_changes_of_the_network_are_told_by_their_keys(tmp_path: Path) -> None:
    record_start(tmp_path, config(f"{KEY}.pair_channel=24"))
    assert changes(tmp_path, f"{KEY}.pair_channel=32") == [f"{KEY}.pair_channel: 24 -> 32"]
    with pytest.raises(ConfigError, match="pair_channel: 24 -> null"):
        refuse_decisive(changes_since(tmp_path, config()))


def test_every_start_that_differs_is_kept(tmp_path: Path) -> None:
    for override in ("optim.lr=0.5", "optim.lr=0.5", "optim.lr=0.25", "optim.lr=0.5"):
        record_start(tmp_path, config(override))
    kept = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert kept == ["0001.yaml", "0002.yaml", "0003.yaml"]
    assert (tmp_path / FOLDER / "0003.yaml").read_text() == (tmp_path / CURRENT).read_text()
    assert "lr: 0.25" in (tmp_path / FOLDER / "0002.yaml").read_text()


@pytest.mark.parametrize("text", ["a: [1", "a: ${b", "\0"])
def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CURRENT).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read.*remove it"):
        changes_since(tmp_path, config())
