"""``fastfold train``: settings, processes and folder of a run, which writes weights, metrics and a report."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from fastfold.data.training.dataset import check_directory
from fastfold.evoformer.config import is_multimer
from fastfold.parallel import init_distributed, started_processes
from fastfold.training.build import check_network
from fastfold.training.compose import check_settings, network_config
from fastfold.training.config import TrainConfig
from fastfold.training.data import check_templates
from fastfold.training.lifecycle.process import owned
from fastfold.training.lifecycle.settings_history import agreed_settings
from fastfold.training.logging.loggers import Logger
from fastfold.training.logging.tracking import check_tracking
from fastfold.training.parallel_config import plan_of
from fastfold.training.rank_run import RankRun
from fastfold.training.sets.source import open_run_source
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
    tree = network_config(config.model)
    check_settings(config, tree)
    check_network(config, tree)
    check_directory(config.data.directory)
    check_tracking([name for name in ("wandb", "mlflow") if getattr(config.logger, name)])
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
            check_templates(config.data, tree)
            source = open_run_source(
                config.data, config.trainer.validate_chains, context, complexes=is_multimer(tree)
            )
            run = RankRun(config, tree, source, context, loggers)
            return run.complete(settings)
