"""Loggers for Weights & Biases and MLflow, each an extra of the package.

Both services keep all entries, so steps that a resumed run repeats appear twice. Each entry has its step. A file in
the output folder holds the run's identity, so that a resumed run continues it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastfold.errors import ConfigError, OutputError, first_line
from fastfold.training.logging.loggers import Logger
from fastfold.utils.atomic_files import write_atomic

_T = TypeVar("_T")


class WandbLogger(Logger):
    """Logger for Weights & Biases: https://docs.wandb.ai.

    Configured by its usual variables: ``WANDB_MODE=offline`` writes to the folder; ``WANDB_API_KEY``, ``WANDB_ENTITY``
    and ``WANDB_NAME`` are read too.

    Raises:
        ConfigError: The package is not installed, or refuses to start a run.
    """

    def __init__(self, directory: Path, project: str, settings: Mapping[str, Any]) -> None:
        wandb = _installed("wandb")
        identity = _Identity(directory / "wandb_run.txt")
        self._run = _started(
            "Weights & Biases",
            lambda: wandb.init(
                project=project,
                id=identity.known(),
                resume="allow",
                dir=str(directory),
                config=dict(settings),
            ),
        )
        identity.keep(self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        _sent("Weights & Biases", lambda: self._run.log({"step": step} | dict(values)))

    def event(self, step: int, text: str) -> None:
        _sent("Weights & Biases", lambda: self._run.log({"step": step, "event": text}))

    def close(self) -> None:
        _sent("Weights & Biases", self._run.finish)


class MlflowLogger(Logger):
    """Logger for MLflow: https://mlflow.org. Writes to ``MLFLOW_TRACKING_URI``, by default into the folder.

    Arguments and errors as of :class:`WandbLogger`.
    """

    def __init__(self, directory: Path, experiment: str, settings: Mapping[str, Any]) -> None:
        mlflow = _installed("mlflow")
        identity = _Identity(directory / "mlflow_run.txt")
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        self._client = _started("MLflow", lambda: mlflow.tracking.MlflowClient(tracking_uri=place))
        self._run = identity.known() or _started("MLflow", lambda: self._begin(experiment, settings))
        _started("MLflow", lambda: self._client.update_run(self._run, status="RUNNING"))
        identity.keep(self._run)

    def _begin(self, experiment: str, settings: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run: str = self._client.create_run(number).info.run_id
        for name, value in settings.items():
            self._client.log_param(run, name, value)
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:

        def send() -> None:
            for name, value in values.items():
                self._client.log_metric(self._run, name, float(value), step=step)

        _sent("MLflow", send)

    def event(self, step: int, text: str) -> None:
        _sent("MLflow", lambda: self._client.set_tag(self._run, f"event/{step:08d}", text))

    def close(self) -> None:
        _sent("MLflow", lambda: self._client.set_terminated(self._run))


def check_tracking(packages: Sequence[str]) -> None:
    """Check that tracking packages are installed, before the processes of a run start.

    Raises:
        ConfigError: A package is not installed; the message has the command that installs it.
    """
    for package in packages:
        _installed(package)


class _Identity:
    """Identity of a run in a tracking service, kept in the run's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def known(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    def keep(self, identity: str) -> None:
        if identity != self.known():
            write_atomic(self._path, identity + "\n")


def _installed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"logger.{package} needs a package that is not installed: pip install 'fastfold[{package}]'"
        ) from None


def _started(service: str, action: Callable[[], _T]) -> _T:
    try:
        return action()
    except Exception as error:  # errors of the services lack a common type
        raise ConfigError(f"{service} cannot log this run: {first_line(error)}") from error


def _sent(service: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # errors of the services lack a common type
        raise OutputError(f"{service} did not take an entry: {first_line(error)}") from error
