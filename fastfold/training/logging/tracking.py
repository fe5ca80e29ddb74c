"""Loggers for Weights & Biases and MLflow, each an extra of the package.

Both services keep all entries, so steps that a resumed run repeats appear twice. Each entry has its step. A file in
the output folder holds the run's identity, so that a resumed run continues it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, OutputError, first_line
from fastfold.training.logging.loggers import Logger
from fastfold.utils.atomic_files import write_atomic


class WandbLogger(Logger):
    """Logger for Weights & Biases: https://docs.wandb.ai.

    Configured by its usual variables: ``WANDB_MODE=offline`` writes to the folder; ``WANDB_API_KEY``, ``WANDB_ENTITY``
    and ``WANDB_NAME`` are read too.

    Raises:
        ConfigError: The package is not installed, or refuses to start a run.
    """

    def __init__(self, directory: Path, project: str, settings: Mapping[str, Any]) -> None:
        wandb = _installed("wandb")
        identity = directory / "wandb_run.txt"
        known = _identity(identity)
        with _service("Weights & Biases", starts=True):
            self._run = wandb.init(
                project=project, id=known, resume="allow", dir=str(directory), config=dict(settings)
            )
        if self._run.id != known:
            write_atomic(identity, f"{self._run.id}\n")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with _service("Weights & Biases"):
            self._run.log({"step": step} | dict(values))

    def event(self, step: int, text: str) -> None:
        with _service("Weights & Biases"):
            self._run.log({"step": step, "event": text})

    def close(self) -> None:
        with _service("Weights & Biases"):
            self._run.finish()


class MlflowLogger(Logger):
    """Logger for MLflow: https://mlflow.org. Writes to ``MLFLOW_TRACKING_URI``, by default into the folder.

    Arguments and errors as of :class:`WandbLogger`.
    """

    def __init__(self, directory: Path, experiment: str, settings: Mapping[str, Any]) -> None:
        mlflow = _installed("mlflow")
        identity = directory / "mlflow_run.txt"
        known = _identity(identity)
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        with _service("MLflow", starts=True):
            self._client = mlflow.tracking.MlflowClient(tracking_uri=place)
            self._run = known or self._begin(experiment, settings)
            self._client.update_run(self._run, status="RUNNING")
        if self._run != known:
            write_atomic(identity, f"{self._run}\n")

    def _begin(self, experiment: str, settings: Mapping[str, Any]) -> str:
        tracked = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if tracked is None else tracked.experiment_id
        run: str = self._client.create_run(number).info.run_id
        for name, value in settings.items():
            self._client.log_param(run, name, value)
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with _service("MLflow"):
            for name, value in values.items():
                self._client.log_metric(self._run, name, float(value), step=step)

    def event(self, step: int, text: str) -> None:
        with _service("MLflow"):
            self._client.set_tag(self._run, f"event/{step:08d}", text)

    def close(self) -> None:
        with _service("MLflow"):
            self._client.set_terminated(self._run)


def check_tracking(packages: Sequence[str]) -> None:
    """Check that tracking packages are installed, before the processes of a run start.

    Raises:
        ConfigError: A package is not installed; the message has the command that installs it.
    """
    for package in packages:
        _installed(package)


def _installed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"logger.{package} needs a package that is not installed: pip install 'fastfold[{package}]'"
        ) from None


def _identity(path: Path) -> str | None:
    """Return the identity of a run in a tracking service, kept in the run's folder."""
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


@contextmanager
def _service(name: str, *, starts: bool = False) -> Iterator[None]:
    """Raise errors of a service, which lack a common type, as those of a run's start or of an entry."""
    try:
        yield
    except Exception as error:
        if starts:
            raise ConfigError(f"{name} cannot log this run: {first_line(error)}") from error
        raise OutputError(f"{name} did not take an entry: {first_line(error)}") from error
