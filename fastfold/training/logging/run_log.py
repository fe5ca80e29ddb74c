"""Log of a run: lines on the terminal, numbers and events by the loggers, validations and bad samples in files."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fastfold.parallel import DistributedContext
from fastfold.training.config import TrainConfig
from fastfold.training.lifecycle.settings_history import Change, settings_of
from fastfold.training.logging.loggers import (
    CsvLogger,
    JsonLinesLogger,
    Logger,
    LoggerGroup,
    TensorBoardLogger,
    read_json_lines,
)
from fastfold.training.logging.progress import TrainingProgress
from fastfold.training.logging.tracking import MlflowLogger, WandbLogger
from fastfold.training.step_outcome import Numbers
from fastfold.training.validation import ChainScore, mean_figures
from fastfold.utils.atomic_files import write_atomic

_VALIDATION = "validation.jsonl"  #: File of the scores of every validation


class TrainingLog:
    """Log of a run, which the first process writes; ``more`` are loggers besides those of the configuration.

    Attributes:
        validated: Step of the last logged validation, on the first process; 0 before.
    """

    def __init__(self, config: TrainConfig, context: DistributedContext, more: Sequence[Logger] = ()) -> None:
        self._out, self._is_first = Path(config.trainer.out), context.is_rank_zero
        self.progress = TrainingProgress(config.trainer.steps, quiet=not self._is_first)
        self.say = self.progress.say
        own = [*_open_loggers(config, self._out), *more] if self._is_first else []
        self.loggers = LoggerGroup(own, self.say)
        self.validated = 0

    def event(self, step: int, text: str) -> None:
        """Print and log an event of a step."""
        self.say(text)
        self.loggers.event(step, text)

    def numbers(self, step: int, numbers: Numbers) -> None:
        """Log the numbers of a step, and show them."""
        self.loggers.log(step, numbers)
        self.progress.update(step, numbers)

    def resume_from(self, step: int) -> None:
        """Drop entries from a step on, which the run repeats."""
        self.loggers.resume_from(step)
        if self._is_first:
            path = self._out / _VALIDATION
            JsonLinesLogger(path).resume_from(step)
            entries = read_json_lines(path) if path.exists() else []
            self.validated = max((entry["step"] for entry in entries), default=0)

    def resumed(self, step: int, path: str, suspects: int, changes: Iterable[Change], steps: int) -> None:
        """Log that a run continues from a checkpoint after a step, and what differs from its last start."""
        self.event(step, f"resuming from {path} after step {step}")
        if suspects:
            self.event(step, f"retrying {suspects} quarantined samples when they are drawn")
        for change in changes:
            self.event(step, f"changed since the last start: {change}")
        if step >= steps:
            self.event(
                step,
                f"trainer.steps={steps} was reached before: nothing is trained, weights and report are written again; "
                "set more steps to go on",
            )

    def validation(self, step: int, scores: Sequence[ChainScore], left_out: Iterable[str]) -> None:
        """Log the scores of the validation chains, and the reasons of those without any."""
        for reason in left_out:
            self.say(f"left out of validation: {reason}")
        if not self._is_first or not scores:
            return
        means = mean_figures(scores)
        self.loggers.log(step, means)
        chains = [
            {
                "id": score.id,
                "residues": score.residues,
                "depth": score.depth,
                **{key: _finite(x, 4) for key, x in score.figures().items()},
                "true": np.round(score.true, 3).tolist(),
                "predicted": [_finite(x, 3) for x in score.predicted.tolist()],
            }
            for score in scores
        ]
        self.validated = step
        with (self._out / _VALIDATION).open("a", encoding="utf-8") as file:
            known = {key: _finite(x) for key, x in means.items()}
            file.write(json.dumps({"step": step, **known, "chains": chains}) + "\n")
        self.say(
            f"step {step}: validation on {len(scores)} chain{'s' * (len(scores) > 1)}: "
            f"lDDT-CA {means['valid_lddt_ca']:.3f}, "
            f"TM-score {means['valid_tm_score']:.3f}, predicted lDDT {means['valid_plddt']:.3f}"
        )

    def quarantine(self, *parts: Iterable[tuple[str, str]]) -> None:
        """Write the names and reasons of samples that could not be used, or remove the file if all could."""
        if not self._is_first:
            return
        path, reasons = self._out / "quarantine.tsv", dict(itertools.chain(*parts))
        if not reasons:
            path.unlink(missing_ok=True)
            return
        lines = [f"{name}\t{' '.join(reason.split())}\n" for name, reason in sorted(reasons.items())]
        write_atomic(path, "".join(lines))
        self.say(f"{len(lines)} samples could not be used; see {path}")


def _finite(value: float, digits: int | None = None) -> float | None:
    """Return a rounded number, or None for one that is not finite, which JSON does not allow."""
    return (value if digits is None else round(value, digits)) if math.isfinite(value) else None


def _open_loggers(config: TrainConfig, out: Path) -> list[Logger]:
    chosen: list[Logger] = []
    if config.logger.jsonl:
        chosen.append(JsonLinesLogger(out / "metrics.jsonl"))
    if config.logger.csv:
        chosen.append(CsvLogger(out / "metrics.csv"))
    if config.logger.tensorboard:
        chosen.append(TensorBoardLogger(out / "tensorboard"))
    settings = settings_of(config)
    if config.logger.wandb:
        chosen.append(WandbLogger(out, config.logger.project, settings))
    if config.logger.mlflow:
        chosen.append(MlflowLogger(out, config.logger.project, settings))
    return chosen
