"""Train a model of transformers or timm in a plain loop.

torchrun --nproc-per-node 2 -m examples.frameworks.plain_loop --model llama --zero 1
"""

from __future__ import annotations

from typing import Any

import torch

from examples.frameworks import common
from fastfold.parallel import parallelize


def train(name: str, plan: dict[str, Any]) -> common.State:
    """Return the plain model's weights."""
    model = parallelize(common.make_model(name), plan)
    optimizer = model.optimizer(common.make_optimizer)
    samples = common.make_samples(name)
    for step in range(common.STEPS):
        own = samples[step * common.ROWS : (step + 1) * common.ROWS][model.rows(common.ROWS)]
        batch = torch.utils.data.default_collate(own)
        model(**batch)["loss"].backward()
        model.clip_grad_norm_(common.NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


if __name__ == "__main__":
    common.main(__doc__, train)
