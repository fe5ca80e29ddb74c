"""``fastfold train``: a run from its settings to weights, metrics and a report."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

from ml_collections import ConfigDict
from omegaconf import DictConfig

from fastfold.data.training.dataset import check_directory
from fastfold.errors import FastFoldError, OutputError
from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.model import AlphaFold
from fastfold.parallel import DistributedContext, init_distributed, started_processes
from fastfold.training.build import parallel_network, plain_network
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.contents import Json
from fastfold.training.compose import check_settings, network_config
from fastfold.training.config import TrainConfig
from fastfold.training.data import (
    check_templates,
    describe_templates,
    entry_reader,
    make_loader,
    takes_templates,
)
from fastfold.training.lifecycle.process import owned
from fastfold.training.lifecycle.settings_history import (
    Change,
    agreed_settings,
    changes_since,
    record_start,
    refuse_decisive,
)
from fastfold.training.logging.draw_log import DrawLog
from fastfold.training.logging.loggers import Logger
from fastfold.training.logging.run_log import TrainingLog
from fastfold.training.logging.tracking import check_tracking
from fastfold.training.optim.ema import ExponentialMovingAverage
from fastfold.training.parallel_config import plan_of
from fastfold.training.report.report import write_report
from fastfold.training.sets.source import open_run_source
from fastfold.training.trained_weights import write_weights
from fastfold.training.trainer import Hooks, Trainer, TrainingStopped
from fastfold.training.validation import score_entries
from fastfold.utils.device import choose_device


def train(config: TrainConfig, *, loggers: Sequence[Logger] = ()) -> bool:
    """Train as configured, and write all results to the run's folder; return False if a signal ended it.

    Args:
        config: The settings of the run, for example from :func:`fastfold.training.compose.compose_config`.
        loggers: Loggers in addition to those of the configuration; called on the first process.

    Raises:
        FastFoldError: The training set is missing or empty, the configuration is invalid, weights cannot be read, the
            folder is not writable or in use by another run, or training stopped.

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
    # Check the settings, and build the network, before anything is opened.
    tree = network_config(config.model)
    check_settings(config, tree)
    model = plain_network(config, tree)
    check_directory(config.data.directory)
    check_tracking([name for name in ("wandb", "mlflow") if getattr(config.logger, name)])

    # Choose the plan of the processes, which then meet.
    chosen = None
    if config.parallel.auto:
        from fastfold.training.auto_parallel import choose_plan  # slow to import

        config, chosen = choose_plan(config, tree)
    plan = plan_of(config.parallel, started_processes())
    device = choose_device(config.trainer.device, remedy="trainer.device=cpu")
    timeout = timedelta(minutes=config.parallel.timeout_minutes)
    with init_distributed(plan, device, timeout=timeout) as context:
        settings = agreed_settings(config, context)
        if chosen is not None and context.is_rank_zero:
            print(f"parallel=auto: {chosen}", flush=True)
        with owned(Path(config.trainer.out), context):
            return _train_on_rank(model, config, tree, settings, context, loggers)


def _train_on_rank(
    model: AlphaFold,
    config: TrainConfig,
    tree: ConfigDict,
    settings: DictConfig,
    context: DistributedContext,
    loggers: Sequence[Logger],
) -> signal.Signals | None:
    """Train one process's part of a run; return the signal that ended it before its last step, or None.

    ``settings`` are those of the run, as all processes agreed on them.
    """
    run, out = config.trainer, Path(config.trainer.out)

    # Find the samples, and place the network by the plan.
    check_templates(config.data, tree)
    source = open_run_source(config.data, run.validate_chains, context, complexes=is_multimer(tree))
    parallel = parallel_network(model, config, context)
    ema = ExponentialMovingAverage(parallel.module, config.optim.ema_decay, warm_up=True)
    reader = entry_reader(config.data)

    # Open the files of the run.
    log = TrainingLog(config, context, loggers)
    draws = DrawLog(out, context.dp_rank, context.dp_size) if context.is_leader else None

    def report(text: str) -> None:
        log.event(trainer.progress.step, text)

    checkpoints = Checkpoints(
        run.checkpoint_dir or str(out / "checkpoints"),
        context,
        keep_last=run.keep_last,
        keep_every=run.keep_every,
        report=report,
    )

    # Load samples, in the recorded order if a resumed run would have another.
    repeats = config.data.order == "ready" and run.resume != "never" and context.dp_size == context.size
    replay = draws.replay() if draws is not None and repeats else []
    loader = make_loader(source, reader, config.data, tree, run.seed, context, replay)

    def validate(step: int) -> None:
        """Score the entries to validate on with the averaged weights, and log the scores, unless the log has them."""
        if context.gather(log.validated)[0] == step:
            return
        parallel.module.eval()
        with ema.swapped_in():
            network = cast(AlphaFold, parallel.module)
            recycles = run.validate_recycles
            scores, left_out = score_entries(network, source.valid, reader, tree, recycles, context)
        log.validation(step, scores, left_out)

    # Without a log of draws, another process of the same share records the consumed samples.
    consumed = (lambda step, samples: None) if draws is None else draws.write
    hooks = Hooks(log.numbers, consumed, validate=validate if source.valid else None, report=report)
    trainer = Trainer(parallel, tree, config, loader, context, checkpoints=checkpoints, ema=ema, hooks=hooks)

    with loader, log.progress:
        # Resume from the last checkpoint, if any, and record the settings of this start.
        changes: list[Change] = []

        def check(state: Json) -> None:
            # The last start in this folder counts, or else the checkpoint's.
            changes.extend(context.gather(changes_since(out, settings, state.get("settings")))[0])
            if not run.accept_changes:
                refuse_decisive(changes)

        path = trainer.restore(run.resume, check=check)
        if context.is_rank_zero:
            record_start(out, settings)
        log.resume_from(trainer.progress.step + 1)
        if path is not None:
            quarantined = {name for part in context.gather(loader.quarantined) for name, _ in part}
            log.resumed(trainer.progress.step, path, len(quarantined), changes, run.steps)
        log.say(source.train.summary())
        if takes_templates(tree):
            log.say(describe_templates(reader, source.train.entries))

        # Train; after an error, log it and the samples that could not be used.
        try:
            trainer.run()
        except BaseException as error:
            if isinstance(error, TrainingStopped):
                log.loggers.event(trainer.progress.step, str(error))
                with suppress(FastFoldError):  # the error that stopped the run is the one to raise
                    _write_report(out, context, log)
            # Do not wait for other processes, which may be anywhere, so that this process's error is reported.
            log.quarantine(source.unreadable, loader.quarantined)
            if context.size == 1:
                checkpoints.wait()
            raise
        finally:
            log.loggers.close()
            if draws is not None:
                draws.close()
        checkpoints.wait()
        log.quarantine(source.unreadable, *context.gather(loader.quarantined))

    # Write the averaged weights and the report.
    if trainer.stopped_by is None:
        with ema.swapped_in():
            weights = parallel.state_dict(rank0_only=True)
        if context.is_rank_zero:
            write_weights(config, tree, weights, trainer.progress, log.say)
        _write_report(out, context, log)
        context.barrier()
    if checkpoints.problem is not None:
        raise OutputError(
            f"{checkpoints.problem}. Fix it and run the same command again: training resumes from the last checkpoint"
        )
    return trainer.stopped_by


def _write_report(out: Path, context: DistributedContext, log: TrainingLog) -> None:
    if context.is_rank_zero:
        log.say(f"report in {write_report(out)}")
