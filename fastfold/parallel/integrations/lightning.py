"""Lightning's Trainer for parallel models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.integrations import check_samples
from fastfold.parallel.parallel_model import Parallel


class ParallelStrategy(DDPStrategy):
    """Strategy for a ``LightningModule`` that holds models under plans of ``dp`` and ``zero``.

    The models reduce their gradients, so no wrapper is put around the module. ``configure_optimizers`` returns
    ``model.optimizer(...)``; ``gradient_clip_val`` clips the whole model; checkpoints hold plain weights and states.
    """

    def setup(self, trainer: Any) -> None:
        """Prepare a run of the trainer.

        Raises:
            ConfigError: The module holds no parallel model, trains parameters outside of one, or has a plan with other
                axes.
        """
        module, models = self.lightning_module, self._models()
        own = {id(p) for model in models for p in model.parameters()}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in own:
                raise ConfigError(
                    f"{name} is outside of the model that parallelize() returned, so its gradient would stay on its "
                    "rank: make it a part of that model"
                )
        for model in models:
            check_samples(model.plan, "Lightning")
        if not models:
            raise ConfigError(
                "ParallelStrategy needs a LightningModule with a model that parallelize() returned"
            )
        # Rank 0 does not send these to the others before validation.
        module._ddp_params_and_buffers_to_ignore = [*module.state_dict(), *dict(module.named_parameters())]
        self.precision_plugin.clip_grad_by_norm = _clip_whole_norm
        super().setup(trainer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip reduction in backward passes inside the context, for ``accumulate_grad_batches``."""
        with ExitStack() as paused:
            for model in self._models():
                paused.enter_context(model.no_sync())
            yield

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def _register_ddp_hooks(self) -> None:
        pass

    def _models(self) -> list[Parallel]:
        return [part for part in self.lightning_module.modules() if isinstance(part, Parallel)]


def _clip_whole_norm(optimizer: Any, clip_val: float) -> None:
    optimizer.clip_grad_norm_(float(clip_val))
