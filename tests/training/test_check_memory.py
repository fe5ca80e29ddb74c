"""What a memory manager does not go together with is refused before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan
from fastfold.training.build import check_memory
from tests.helpers.compositions import compose_run


def context(size: int = 1, device: str = "cpu", zero: int = 0) -> Any:
    """What the checks read of a run's processes."""
    mesh = SimpleNamespace(plan=ParallelPlan(dp=size, zero=zero))
    return SimpleNamespace(size=size, device=torch.device(device), mesh=mesh)


def config(*overrides: str) -> Any:
    return compose_run(["data.directory=x", "trainer.out=y"], *overrides)


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (
            ["memory=gemini", "memory.budget=1GiB", "optim=muon"],
            context(),
            "does not support optim.name=muon",
        ),
        (["memory=gemini", "memory.budget=1GiB"], context(2, zero=1), "does not support parallel.zero"),
        (["memory=gemini", "memory.budget=1GiB"], context(2, "cuda"), "several processes with GPUs"),
        (["memory=gemini", "memory.budget=much"], context(), "'much' is not an amount of memory"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], processes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_memory(config(*overrides), processes)


def test_without_a_policy_everything_goes() -> None:
    check_memory(config("optim=muon"), context(2, "cuda", zero=1))
