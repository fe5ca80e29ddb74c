"""Part of one process in a run: build the network and the loader, resume, train, and write the results."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from ml_collections import ConfigDict
from omegaconf import DictConfig

from fastfold.errors import FastFoldError, OutputError
from fastfold.evoformer.model import AlphaFold
from fastfold.parallel import DistributedContext
from fastfold.training.build import build_network
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.contents import Json
from fastfold.training.config import TrainConfig
from fastfold.training.data import describe_templates, entry_reader, make_loader, takes_templates
from fastfold.training.lifecycle.settings_history import Change, changes_since, record_start, refuse_decisive
from fastfold.training.logging.draw_log import DrawLog
from fastfold.training.logging.loggers import Logger
from fastfold.training.logging.run_log import TrainingLog
from fastfold.training.optim.ema import ExponentialMovingAverage
from fastfold.training.report.report import write_report
from fastfold.training.sets.source import SampleSource
from fastfold.training.trained_weights import write_weights
from fastfold.training.trainer import Hooks, Trainer, TrainingStopped
from fastfold.training.validation import score_entries


class RankRun:
    """Part of this process in a run; all processes call its methods together.

    Args:
        config: Settings of the run.
        tree: Configuration of its network.
        source: Entries to train on and to validate on.
        context: The processes.
        loggers: Loggers in addition to those of the configuration; called on the first process.

    Raises:
        FastFoldError: Weights cannot be read, the plan does not fit the network, or a folder cannot be used.
    """

    def __init__(
        self,
        config: TrainConfig,
        tree: ConfigDict,
        source: SampleSource,
        context: DistributedContext,
        loggers: Sequence[Logger],
    ) -> None:
        self.config, self.tree, self.source, self.context = config, tree, source, context
        run = config.trainer
        self.out = Path(run.out)
        self.parallel = build_network(config, tree, context)
        self.ema = ExponentialMovingAverage(self.parallel.module, config.optim.ema_decay, warm_up=True)
        self.reader = entry_reader(config.data)
        self.log = TrainingLog(config, context, loggers)
        self.draws = DrawLog(self.out, context.dp_rank, context.dp_size) if context.is_leader else None
        self.checkpoints = Checkpoints(
            run.checkpoint_dir or str(self.out / "checkpoints"),
            context,
            keep_last=run.keep_last,
            keep_every=run.keep_every,
            report=self._report,
        )
        repeats = config.data.order == "ready" and run.resume != "never" and context.dp_size == context.size
        replay = self.draws.replay() if self.draws is not None and repeats else []
        self.loader = make_loader(source, self.reader, config.data, tree, run.seed, context, replay)
        # Without a log of draws, another process of the same share records the consumed samples.
        consumed = (lambda step, samples: None) if self.draws is None else self.draws.write
        hooks = Hooks(self.log.numbers, consumed, validate=self._validate, report=self._report)
        self.trainer = Trainer(
            self.parallel,
            tree,
            config,
            self.loader,
            context,
            checkpoints=self.checkpoints,
            ema=self.ema,
            hooks=hooks,
        )

    def complete(self, settings: DictConfig) -> signal.Signals | None:
        """Resume, train and write the results; return the signal that ended the run before its last step, or None.

        ``settings`` are those of the run, as all processes agreed on them.

        Raises:
            FastFoldError: The last checkpoint belongs to another run, training stopped, or a file cannot be written.
        """
        with self.loader, self.log.progress:
            self._resume(settings)
            self._say_samples()
            self._train()
        if self.trainer.stopped_by is None:
            self._write_results()
        if self.checkpoints.problem is not None:
            raise OutputError(
                f"{self.checkpoints.problem}. Fix it and run the same command again: training resumes from the last "
                "checkpoint"
            )
        return self.trainer.stopped_by

    def _resume(self, settings: DictConfig) -> None:
        """Restore the last checkpoint, if any, and record the settings of this start."""
        run, context = self.config.trainer, self.context
        changes: list[Change] = []

        def check(state: Json) -> None:
            # The last start in this folder counts, or else the checkpoint's.
            changes.extend(context.gather(changes_since(self.out, settings, state.get("settings")))[0])
            if not run.accept_changes:
                refuse_decisive(changes)

        path = self.trainer.restore(run.resume, check=check)
        step = self.trainer.progress.step
        if context.is_rank_zero:
            record_start(self.out, settings)
        self.log.resume_from(step + 1)
        if path is not None:
            quarantined = {name for part in context.gather(self.loader.quarantined) for name, _ in part}
            self.log.resumed(step, path, len(quarantined), changes, run.steps)

    def _say_samples(self) -> None:
        self.log.say(self.source.train.summary())
        if takes_templates(self.tree):
            self.log.say(describe_templates(self.reader, self.source.train.entries))

    def _train(self) -> None:
        """Run the loop; after an error, log it and the samples that could not be used."""
        try:
            self.trainer.run()
        except BaseException as error:
            if isinstance(error, TrainingStopped):
                self.log.loggers.event(self.trainer.progress.step, str(error))
                with suppress(FastFoldError):  # the error that stopped the run is the one to raise
                    self._write_report()
            # Do not wait for other processes, which may be anywhere, so that this process's error is reported.
            self.log.quarantine(self.source.unreadable, self.loader.quarantined)
            if self.context.size == 1:
                self.checkpoints.wait()
            raise
        finally:
            self.log.loggers.close()
            if self.draws is not None:
                self.draws.close()
        self.checkpoints.wait()
        self.log.quarantine(self.source.unreadable, *self.context.gather(self.loader.quarantined))

    def _write_results(self) -> None:
        """Write the averaged weights and the report."""
        with self.ema.swapped_in():
            weights = self.parallel.state_dict(rank0_only=True)
        if self.context.is_rank_zero:
            write_weights(self.config, self.tree, weights, self.trainer.progress, self.log.say)
        self._write_report()
        self.context.barrier()

    def _write_report(self) -> None:
        if self.context.is_rank_zero:
            self.log.say(f"report in {write_report(self.out)}")

    def _report(self, text: str) -> None:
        self.log.event(self.trainer.progress.step, text)

    def _validate(self, step: int) -> None:
        """Score the entries to validate on with the averaged weights, and log the scores."""
        if not self.source.valid:
            return
        self.parallel.module.eval()
        with self.ema.swapped_in():
            scores, left_out = score_entries(
                cast(AlphaFold, self.parallel.module),
                self.source.valid,
                self.reader,
                self.tree,
                self.config.trainer.validate_recycles,
                self.context,
            )
        self.log.validation(step, scores, left_out)
