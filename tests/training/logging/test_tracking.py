"""Weights & Biases and MLflow: a run goes on under its name, entries have their steps, failures are said."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.errors import ConfigError, OutputError
from fastfold.training.compose import compose_config
from fastfold.training.logging.loggers import Logger
from fastfold.training.logging.tracking import MlflowLogger, WandbLogger, check_tracking
from fastfold.training.run import train

SETTINGS = {"optim.lr": 0.001}


class _Wandb(SimpleNamespace):
    """Stands in for the package: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(started=[], told=[], metrics=[], failure=None)

    def init(self, **options: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        self.started.append(options)
        return SimpleNamespace(
            id=options["id"] or "abc", log=self._log, finish=lambda: None, define_metric=self._define
        )

    def _log(self, entry: dict[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        self.told.append(entry)

    def _define(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Wandb:
    module = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    return module


def test_wandb_gets_numbers_events_and_settings_and_a_resume_adds_to_the_run(wandb: _Wandb, tmp_path: Path):
    for _ in range(2):
        logger: Logger = WandbLogger(tmp_path, "proteins", SETTINGS)
        logger.resume_from(3)
        logger.log(3, {"loss": 2.0})
        logger.event(4, "stopped")
        logger.close()
    assert [one["id"] for one in wandb.started] == [None, "abc"]
    assert {one["project"] for one in wandb.started} == {"proteins"}
    assert all(one["config"] == SETTINGS and one["resume"] == "allow" for one in wandb.started)
    assert wandb.told == [{"step": 3, "loss": 2.0}, {"step": 4, "event": "stopped"}] * 2
    assert wandb.metrics[0] == ("*", "step")


def test_what_a_service_refuses_is_said(wandb: _Wandb, tmp_path: Path):
    logger = WandbLogger(tmp_path, "proteins", SETTINGS)
    wandb.failure = RuntimeError("no network\nand a traceback")
    with pytest.raises(OutputError, match=r"Weights & Biases did not take an entry: no network$"):
        logger.log(1, {"loss": 2.0})
    with pytest.raises(ConfigError, match=r"Weights & Biases cannot log this run: no network$"):
        WandbLogger(tmp_path, "proteins", SETTINGS)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_without_the_package_is_refused_before_it_begins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    remedy = re.escape(f"logger.{name} needs a package that is not installed: pip install 'fastfold[{name}]'")
    with pytest.raises(ConfigError, match=remedy):
        check_tracking([name])
    out = tmp_path / "out"
    config = compose_config([f"logger={name}", f"data.directory={tmp_path}", f"trainer.out={out}"])
    with pytest.raises(ConfigError, match=remedy):
        train(config)
    assert not out.exists()


def test_mlflow_itself_keeps_numbers_events_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):
        logger: Logger = MlflowLogger(tmp_path, "proteins", SETTINGS)
        logger.log(step, {"loss": float(step), "valid/lddt_ca": 0.5})
        logger.event(step, f"event {step}")
        logger.close()
    client = mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("proteins")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"optim.lr": "0.001"}
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 1.0),
        (2, 2.0),
    ]
    assert {k: v for k, v in run.data.tags.items() if k.startswith("event")} == {
        "event/00000001": "event 1",
        "event/00000002": "event 2",
    }
    assert run.info.status == "FINISHED"


def test_wandb_itself_takes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(tmp_path, "proteins", SETTINGS)
    logger.log(1, {"loss": 2.0})
    logger.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
