"""Chunk by chunk, and by nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.memory import SimulatedDevice, Tier
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import build_chunks
from fastfold.memory.gemini.distributed import Ranks
from fastfold.memory.gemini.optimizer.step import OptimizerStep


class Watched(torch.optim.SGD):
    """Notes how many parameters each step has, and fails at a given one."""

    fails_at = 10

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.counts = [
            *vars(self).get("counts", []),
            sum(len(group["params"]) for group in self.param_groups),
        ]
        if len(self.counts) == self.fails_at:
            raise MemoryError("no memory")
        super().step(closure)


def _parts() -> tuple[nn.Module, Watched, ChunkStore, OptimizerStep]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    for parameter in list(model.parameters())[:3]:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Watched(model.parameters(), lr=1.0)
    store = ChunkStore(build_chunks(model, largest=1), SimulatedDevice(1 << 20), Tier())
    return model, optimizer, store, OptimizerStep(optimizer, store, Ranks(None, None, False))


def test_chunks_with_gradients_are_stepped_one_after_the_other() -> None:
    model, optimizer, store, step = _parts()
    with store.params_on_host():
        before = [p.detach().clone() for p in model.parameters()]
    step.run()
    assert optimizer.counts == [2, 1]
    assert len(optimizer.param_groups[0]["params"]) == 5
    with store.params_on_host():
        moved = [(x - p).detach() for x, p in zip(before, model.parameters(), strict=True)]
    for number, by in enumerate(moved):
        torch.testing.assert_close(by, torch.full_like(by, float(number < 3)))


def test_nobody_else_steps_it_until_it_is_given_back() -> None:
    model, optimizer, store, step = _parts()
    with pytest.raises(ConfigError, match=r"call step\(\) of the Gemini manager"):
        optimizer.step()
    step.remove()
    store.release()
    optimizer.step()
    assert optimizer.counts == [5]
    assert model[0].weight.isfinite().all()


def test_a_step_that_fails_between_chunks_is_remembered() -> None:
    _, optimizer, _, step = _parts()
    step.check_whole()
    optimizer.fails_at = 2
    with pytest.raises(MemoryError):
        step.run()
    assert len(optimizer.param_groups[0]["params"]) == 5, "groups are as before"
    with pytest.raises(ConfigError, match="failed half way"):
        step.check_whole()
    step.half_done = False
    step.check_whole()
