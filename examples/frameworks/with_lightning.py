"""Train a model of transformers or timm by Lightning.

torchrun --nproc-per-node 2 -m examples.frameworks.with_lightning --model timm --zero 1
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from examples.frameworks import common
from fastfold.parallel import Parallel, parallelize
from fastfold.parallel.integrations.lightning import ParallelStrategy


class Training(lightning.LightningModule):
    """Loss and optimizer of a parallel model."""

    def __init__(self, model: Parallel) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of this process's samples."""
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the plan's optimizer."""
        return self.model.optimizer(common.make_optimizer)


def train(name: str, plan: dict[str, Any]) -> common.State:
    """Return the plain model's weights."""
    model = parallelize(common.make_model(name), plan)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=plan["dp"],
        strategy=ParallelStrategy(),
        max_epochs=1,
        gradient_clip_val=common.NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples: Any = common.make_samples(name)
    dealt = DistributedSampler(samples, shuffle=False)  # Lightning's own shuffles
    loader = DataLoader(samples, common.ROWS // plan["dp"], sampler=dealt)
    trainer.fit(Training(model), loader)
    return model.state_dict()


if __name__ == "__main__":
    common.main(__doc__, train)
