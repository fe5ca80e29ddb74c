"""Train a model of transformers or timm by accelerate.

torchrun --nproc-per-node 2 -m examples.frameworks.with_accelerate --model vit --zero 2
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from examples.frameworks import common
from fastfold.parallel import parallelize
from fastfold.parallel.integrations.accelerate import adopt_accelerator


def train(name: str, plan: dict[str, Any]) -> common.State:
    """Return the plain model's weights."""
    accelerator = Accelerator(cpu=True)
    model = parallelize(common.make_model(name), plan)
    adopt_accelerator(accelerator, model)
    loader = DataLoader(common.make_samples(name), batch_size=common.ROWS // accelerator.num_processes)
    optimizer = model.optimizer(common.make_optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), common.NORM)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


if __name__ == "__main__":
    common.main(__doc__, train)
