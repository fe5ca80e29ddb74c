"""``parallel=auto`` takes the best plan for the processes that were started, and says when there is none."""

from __future__ import annotations

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.parallel import best_plans
from fastfold.training import auto_parallel
from fastfold.training.auto_parallel import choose_plan, workload_of
from fastfold.training.compose import compose_config, network_config
from fastfold.training.parallel_config import plan_of

OVERRIDES = [
    "model=model_3_ptm",
    "parallel=auto",
    "data.directory=data",
    "data.crop_size=32",
    "trainer.out=run",
    "optim.batch_size=1",
    "model.overrides.model.heads.structure_module.num_layer=2",
]


@pytest.mark.long
def test_auto_is_the_best_plan_and_one_that_training_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = compose_config([*OVERRIDES, "parallel.gpu=h200"])
    tree = network_config(config.model)
    workload = workload_of(config, tree)  # keeps its traces
    asked = []
    monkeypatch.setattr(auto_parallel, "workload_of", lambda *given: asked.append(given) or workload)
    chosen, line = choose_plan(config, tree)
    assert asked == [(config, tree)]
    # One sample for two processes: they have to share it.
    plan = plan_of(chosen.parallel, 2)
    assert (plan.dp, plan.dap) == (1, 2)
    best = best_plans(workload, gpus=2, gpu="h200", count=1)[0]
    assert (plan, chosen.memory.checkpointing) == (best.plan, best.checkpointing)
    assert "parallel.dap=2" in line
    assert not chosen.parallel.auto


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to plan for")
def test_auto_without_a_gpu_asks_for_its_name() -> None:
    config = compose_config(OVERRIDES)
    with pytest.raises(ConfigError, match=r"found no GPU on this machine; name one .parallel\.gpu=h200"):
        choose_plan(config, network_config(config.model))


def test_auto_for_an_unknown_gpu_names_the_nearest() -> None:
    config = compose_config([*OVERRIDES, "parallel.gpu=h20"])
    with pytest.raises(ConfigError, match="did you mean h200"):
        choose_plan(config, network_config(config.model))
