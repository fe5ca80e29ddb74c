"""The gradients' reduction follows the plan's ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastfold.parallel import ParallelMesh, ParallelPlan
from fastfold.parallel.data_parallel.by_stage import make_gradients
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.own_stages import OwnStages


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_one_process_keeps_its_gradients(zero: int) -> None:
    module = nn.Linear(3, 2)
    mesh = ParallelMesh(ParallelPlan(zero=zero))
    gradients = make_gradients(OwnStages(module, {}, []), mesh, MixedPrecisionPolicy())
    assert isinstance(gradients, Replicated)
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 3))  # type: ignore[arg-type]


def test_a_policy_computes_in_its_dtype() -> None:
    module = nn.Linear(3, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    make_gradients(OwnStages(module, {}, []), ParallelMesh(ParallelPlan()), policy)
    assert module(torch.ones(1, 3)).dtype == torch.bfloat16
    assert module.weight.dtype == torch.float32
