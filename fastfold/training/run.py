"""``fastfold train``: run a configuration and write weights, metrics and a report."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from ml_collections import ConfigDict
from omegaconf import DictConfig, OmegaConf

from fastfold._version import __version__
from fastfold.data.loading.loader import retry_io
from fastfold.data.training.entry import Entry, EntryData
from fastfold.errors import ConfigError, FastFoldError, InputError, OutputError
from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.adapters import write_adapter
from fastfold.evoformer.weights.checkpoint import save_weights
from fastfold.parallel import DistributedContext, init_distributed, started_processes
from fastfold.training.build import build_network, plain_network
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.contents import Json
from fastfold.training.compose import check_settings, network_config, to_yaml
from fastfold.training.config import TrainConfig
from fastfold.training.data import (
    EntryReader,
    check_templates,
    describe_templates,
    entry_reader,
    make_loader,
    takes_templates,
)
from fastfold.training.lifecycle.process import owned
from fastfold.training.lifecycle.settings_history import (
    Change,
    changes_since,
    record_start,
    refuse_decisive,
    settings_of,
)
from fastfold.training.logging.draw_log import DrawLog, consumed_chains
from fastfold.training.logging.loggers import (
    CsvLogger,
    JsonLinesLogger,
    Logger,
    LoggerGroup,
    TensorBoardLogger,
)
from fastfold.training.logging.progress import TrainingProgress
from fastfold.training.logging.tracking import MlflowLogger, WandbLogger, check_tracking
from fastfold.training.lora import lora_updates, merge_lora
from fastfold.training.optim.ema import ExponentialMovingAverage
from fastfold.training.parallel_config import plan_of
from fastfold.training.report.report import write_report
from fastfold.training.sets.source import SampleSource, open_source
from fastfold.training.trainer import Hooks, Numbers, Trainer, TrainingStopped
from fastfold.training.validation import ChainScore, Templates, mean_figures, score_entry
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.device import choose_device

_LONG_SCAN_S = 20.0  #: Duration of a scan in seconds from which a run suggests an index


def train(config: TrainConfig, *, loggers: Sequence[Logger] = ()) -> bool:
    """Train as configured, and write all results to the run's folder; return False if a signal ended it.

    Args:
        config: The settings of the run, for example from :func:`fastfold.training.compose.compose_config`.
        loggers: Loggers in addition to those of the configuration; called on the first process.

    Raises:
        FastFoldError: The training set is empty, the configuration is invalid, weights cannot be read, the folder is
            not writable or in use by another run, or training stopped.

    Example:
        >>> from pathlib import Path
        >>> import fastfold
        >>> from fastfold.training.compose import compose_config
        >>> _ = Path("1abc.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> settings = ["data.directory=1abc.pdb", "trainer.out=run", "trainer.steps=1", "data.workers=0"]
        >>> fastfold.train(compose_config(["+preset=overfit", *settings]))
        True
        >>> Path("run/mini.safetensors").exists()
        True
    """
    return train_until_stopped(config, loggers=loggers) is None


def train_until_stopped(config: TrainConfig, *, loggers: Sequence[Logger] = ()) -> signal.Signals | None:
    """Train as :func:`train`; return the signal that ended the run before its last step, or None."""
    tree = network_config(config.model)
    check_settings(config, tree)
    check_tracking([name for name in ("wandb", "mlflow") if getattr(config.logger, name)])
    chosen = None
    if config.parallel.auto:
        from fastfold.training.auto_parallel import choose_plan  # slow to import

        config, chosen = choose_plan(config, tree)
    plan = plan_of(config.parallel, started_processes())
    device = choose_device(config.trainer.device, setting="trainer.device=")
    timeout = timedelta(minutes=config.parallel.timeout_minutes)
    with init_distributed(plan, device, timeout=timeout) as context:
        settings = _agree(config, context)
        if chosen is not None and context.is_rank_zero:
            print(f"parallel=auto: {chosen}", flush=True)
        with owned(Path(config.trainer.out), context):
            check_templates(config.data, tree)
            started = time.perf_counter()
            complexes = is_multimer(tree)
            source = open_source(config.data, config.trainer.validate_chains, complexes=complexes)
            seconds = time.perf_counter() - started
            if seconds > _LONG_SCAN_S and config.data.index is None and context.is_rank_zero:
                remedy = "data.index=FOLDER keeps the result"
                print(f"scanning the training set took {seconds:.0f} s; {remedy}", flush=True)
            return _Run(config, settings, tree, source, context, loggers).train()


def _agree(config: TrainConfig, context: DistributedContext) -> DictConfig:
    """Return the settings; refuse ones that differ between processes, because such processes would deadlock."""
    of_all = context.gather(config)
    settings = OmegaConf.structured(config)  # refuses values of wrong types, before the folder is touched
    texts = [to_yaml(each).splitlines() for each in of_all] if len({*map(repr, of_all)}) > 1 else []
    for other, lines in enumerate(texts):
        for first, its in itertools.zip_longest(texts[0], lines, fillvalue="less"):
            if first != its:
                raise ConfigError(
                    f"the processes were started with different settings: {first.strip()} on rank 0, {its.strip()} on "
                    f"rank {other}"
                )
    return settings


class _Run:
    """Part of one process in a run."""

    def __init__(
        self,
        config: TrainConfig,
        settings: DictConfig,
        tree: ConfigDict,
        source: SampleSource,
        context: DistributedContext,
        loggers: Sequence[Logger],
    ) -> None:
        self.config, self.tree, self.source, self.context = config, tree, source, context
        self.settings, self.out = settings, Path(config.trainer.out)
        self.changes: list[Change] = []
        self.parallel = build_network(config, tree, context)
        self.model = cast(AlphaFold, self.parallel.module)
        self.ema = ExponentialMovingAverage(self.model, config.optim.ema_decay, warm_up=True)
        self.reader: EntryReader = entry_reader(config.data)
        self.progress = TrainingProgress(config.trainer.steps, quiet=not context.is_rank_zero)
        self._say = self.progress.say
        own = [*self._open_loggers(), *loggers] if context.is_rank_zero else []
        self.loggers = LoggerGroup(own, self._say)

    def train(self) -> signal.Signals | None:
        config, context = self.config, self.context
        order = DrawLog(self.out, context.dp_rank, context.dp_size) if context.is_leader else None
        checkpoints = Checkpoints(
            config.trainer.checkpoint_dir or str(self.out / "checkpoints"),
            context,
            keep_last=config.trainer.keep_last,
            keep_every=config.trainer.keep_every,
            report=self._event,
        )
        repeats = config.data.order == "ready" and config.trainer.resume != "never"
        replay = order.replay() if order is not None and repeats and context.dp_size == context.size else []
        loader = make_loader(self.source, config.data, self.tree, config.trainer.seed, context, replay)
        hooks = Hooks(
            log=self._log,
            # Another process of the same share records the consumed samples.
            consumed=(lambda step, draws: None) if order is None else order.write,
            validate=self._validate,
            report=self._event,
        )
        self.trainer = trainer = Trainer(
            self.parallel,
            self.tree,
            config,
            loader,
            context,
            checkpoints=checkpoints,
            ema=self.ema,
            hooks=hooks,
        )
        with loader, self.progress:
            path = trainer.restore(config.trainer.resume, check=self._check_changes)
            if context.is_rank_zero:
                record_start(self.out, self.settings)
            self.loggers.resume_from(trainer.progress.step + 1)
            if context.is_rank_zero:
                JsonLinesLogger(self.out / "validation.jsonl").resume_from(trainer.progress.step + 1)
            if path is not None:
                self._event(f"resuming from {path} after step {trainer.progress.step}")
                suspects = {name for part in context.gather(loader.quarantined) for name, _ in part}
                if suspects:
                    self._event(f"retrying {len(suspects)} quarantined samples when they are drawn")
                for change in self.changes:
                    self._event(f"changed since the last start: {change}")
                if trainer.progress.step >= config.trainer.steps:
                    self._event(
                        f"trainer.steps={config.trainer.steps} was reached before: nothing is trained, weights and "
                        "report are written again; set more steps to go on"
                    )
            self._say(self.source.train.summary())
            if takes_templates(self.tree):
                self._say(describe_templates(self.reader, self.source.train.entries))
            try:
                trainer.run()
            except BaseException as error:
                if isinstance(error, TrainingStopped):
                    self._leave_report(error)
                # Do not wait for other processes, which may be anywhere, so that this process's error is reported.
                self._write_quarantine([loader.quarantined])
                if context.size == 1:
                    checkpoints.wait()
                raise
            finally:
                self.loggers.close()
                if order is not None:
                    order.close()
            checkpoints.wait()
            self._write_quarantine(context.gather(loader.quarantined))
        if trainer.stopped_by is None:
            self._export(trainer)
            if context.is_rank_zero:
                self._say(f"report in {write_report(self.out)}")
            context.barrier()
        if checkpoints.problem is not None:
            raise OutputError(
                f"{checkpoints.problem}. Fix it and run the same command again: training resumes from the last "
                "checkpoint"
            )
        return trainer.stopped_by

    def _check_changes(self, state: Json) -> None:
        """Compare the settings with those of the last start in this folder, or else of the checkpoint."""
        changes = changes_since(self.out, self.settings, state.get("settings"))
        self.changes = self.context.gather(changes)[0]
        if not self.config.trainer.accept_changes:
            refuse_decisive(self.changes)

    def _open_loggers(self) -> list[Logger]:
        chosen: list[Logger] = []
        if self.config.logger.jsonl:
            chosen.append(JsonLinesLogger(self.out / "metrics.jsonl"))
        if self.config.logger.csv:
            chosen.append(CsvLogger(self.out / "metrics.csv"))
        if self.config.logger.tensorboard:
            chosen.append(TensorBoardLogger(self.out / "tensorboard"))
        if self.config.logger.wandb:
            chosen.append(WandbLogger(self.out, self.config.logger.project, settings_of(self.settings)))
        if self.config.logger.mlflow:
            chosen.append(MlflowLogger(self.out, self.config.logger.project, settings_of(self.settings)))
        return chosen

    # ---- hooks of the loop ---------------------------------------------------------------------------

    def _event(self, text: str) -> None:
        self._say(text)
        self.loggers.event(self.trainer.progress.step, text)

    def _leave_report(self, error: TrainingStopped) -> None:
        self.loggers.event(self.trainer.progress.step, str(error))
        if self.context.is_rank_zero:
            with suppress(FastFoldError):  # the error that stopped the run is the one to raise
                self._say(f"report in {write_report(self.out)}")

    def _log(self, step: int, numbers: Numbers) -> None:
        self.loggers.log(step, numbers)
        self.progress.update(step, numbers)

    def _validate(self, step: int) -> None:
        """Fold this process's share of the validation chains with the averaged weights."""
        entries = self.source.valid
        if not entries:
            return
        own: list[ChainScore] = []
        failed: list[str] = []
        self.model.eval()
        with self.ema.swapped_in():
            for entry in entries[self.context.dp_rank :: self.context.dp_size]:
                try:
                    data, templates = retry_io(partial(self._read, entry))
                except (InputError, OSError) as error:
                    failed.append(f"{entry.id}: {error}")
                    continue
                recycles = self.config.trainer.validate_recycles
                own.append(score_entry(self.model, entry.id, data, self.tree, recycles, templates=templates))
        gathered = self.context.leaders(self.context.gather((own, failed)))
        scores = sorted((score for part, _ in gathered for score in part), key=lambda score: score.id)
        for reason in (reason for _, part in gathered for reason in part):
            self._say(f"left out of validation: {reason}")
        if self.context.is_rank_zero and scores:
            self._record_validation(step, scores)

    def _read(self, entry: Entry) -> tuple[EntryData, Templates]:
        data = self.reader(entry)
        candidates = self.reader.candidates(entry, data)
        return data, {sequence: chosen.best() for sequence, chosen in candidates.items()}

    def _record_validation(self, step: int, scores: list[ChainScore]) -> None:
        means = mean_figures(scores)
        self.loggers.log(step, means)
        chains = [
            {
                "id": score.id,
                "residues": score.residues,
                "depth": score.depth,
                **{key: None if np.isnan(x) else round(x, 4) for key, x in score.figures().items()},
                "true": np.round(score.true, 3).tolist(),
                "predicted": np.round(score.predicted, 3).tolist(),
            }
            for score in scores
        ]
        with (self.out / "validation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **means, "chains": chains}) + "\n")
        self._say(
            f"step {step}: validation on {len(scores)} chains: lDDT-CA {means['valid_lddt_ca']:.3f}, "
            f"TM-score {means['valid_tm_score']:.3f}, predicted lDDT {means['valid_plddt']:.3f}"
        )

    # ---- results of the run ----------------------------------------------------------------------

    def _write_quarantine(self, parts: list[list[tuple[str, str]]]) -> None:
        if not self.context.is_rank_zero:
            return
        everything = dict(itertools.chain(self.source.unreadable, *parts))
        path = self.out / "quarantine.tsv"
        if everything:
            lines = [f"{name}\t{' '.join(reason.split())}\n" for name, reason in sorted(everything.items())]
            write_atomic(path, "".join(lines))
            self._say(f"{len(lines)} samples could not be used; see {path}")
        else:
            path.unlink(missing_ok=True)

    def _export(self, trainer: Trainer) -> None:
        """Write the averaged weights, adapters merged, as a file for ``fastfold infer``; adapters also alone."""
        with self.ema.swapped_in():
            state = self.parallel.state_dict(rank0_only=True)
        if not self.context.is_rank_zero:
            return
        if self.config.finetune.lora_rank:
            model = plain_network(self.config, self.tree)
            model.load_state_dict(state)
            updates = lora_updates(model)
            for layer in updates:
                state[f"{layer}.weight"] = state[f"{layer}.parametrizations.weight.original"]
            write_adapter(self.out / "adapter", updates, state, base=self.config.model.weights)
            self._say(f"adapter in {self.out / 'adapter'}")
            state = merge_lora(model).state_dict()
        metadata = {
            "trained_steps": str(trainer.progress.step),
            "trained_samples": str(trainer.progress.samples),
            "trained_chains": str(len(consumed_chains(self.out))),
            "fastfold_version": __version__,
        }
        path = self.out / f"{self.config.model.name}.safetensors"
        save_weights(path, state, self.tree, metadata=metadata)
        self._say(f"weights in {path}")
