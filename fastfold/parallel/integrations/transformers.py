"""Hugging Face's Trainer for parallel models."""

from __future__ import annotations

from typing import Any

import transformers

from fastfold.errors import ConfigError
from fastfold.parallel.integrations.accelerate import adopt_accelerator
from fastfold.parallel.parallel_model import Parallel


class ParallelTrainer(transformers.Trainer):
    """``transformers.Trainer`` for a model under a plan of ``dp`` and ``zero``.

    Gradients are clipped over the whole model. Checkpoints hold the plain model and its optimizer's plain states, and
    any number of processes can resume them.

    Args:
        model: Result of :func:`fastfold.parallelize`.
        arguments: Arguments of ``transformers.Trainer``. ``optimizers`` holds ``model.optimizer(...)`` and a schedule
            or None.

    Raises:
        ConfigError: The model lacks a plan, the plan has other axes, or the optimizer is not the plan's.
    """

    def __init__(self, model: Parallel, *arguments: Any, **options: Any) -> None:
        if not isinstance(model, Parallel):
            raise ConfigError(
                f"ParallelTrainer: expected the result of parallelize(), found {type(model).__name__}"
            )
        super().__init__(model, *arguments, **options)
        self._parallel = model
        if self.optimizer is None:
            raise ConfigError("ParallelTrainer needs optimizers=(model.optimizer(...), None)")
        adopt_accelerator(self.accelerator, model)
        if self.args.label_names is None:
            self.label_names = transformers.utils.find_labels(type(model.module))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the plain model, by all processes together; ``from_pretrained()`` reads one of transformers."""
        folder = output_dir or self.args.output_dir
        state = self._parallel.state_dict(rank0_only=True)
        save = getattr(self._parallel.module, "save_pretrained", None)
        if self.args.should_save and save is not None:
            save(folder, state_dict=state)
        elif self.args.should_save:
            self._save(folder, state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Gather the states on all processes; Trainer asks only one process."""
        optimizer: Any = self.optimizer
        whole = optimizer.state_dict()
        optimizer.state_dict = lambda: whole
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            del optimizer.state_dict
