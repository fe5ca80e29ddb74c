"""Train a model of transformers or timm by Hugging Face's Trainer.

torchrun --nproc-per-node 2 -m examples.frameworks.with_trainer --model llama --zero 2
"""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import TrainingArguments, get_constant_schedule

from examples.frameworks import common
from fastfold.parallel import parallelize
from fastfold.parallel.integrations.transformers import ParallelTrainer


def train(name: str, plan: dict[str, Any]) -> common.State:
    """Return the plain model's weights."""
    model = parallelize(common.make_model(name), plan)
    optimizer = model.optimizer(common.make_optimizer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=common.ROWS // plan["dp"],
            train_sampling_strategy="sequential",
            max_steps=common.STEPS,
            max_grad_norm=common.NORM,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ParallelTrainer(
            model,
            arguments,
            train_dataset=common.make_samples(name),
            optimizers=(optimizer, get_constant_schedule(optimizer)),
        )
        trainer.train()
    return model.state_dict()


if __name__ == "__main__":
    common.main(__doc__, train)
