"""A step that does not take place changes no bit; one that does is the optimizer's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import Lamb, initialize_state
from fastfold.parallel.data_parallel.optimizer import keep_unless, step_if

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW([p], lr=0.1, weight_decay=0.1),
    "lamb": lambda p: Lamb({"p": p}, lr=0.1),
}


def _state(optimizer: Any, parameter: nn.Parameter) -> list[torch.Tensor]:
    return [parameter.detach(), *optimizer.state[parameter].values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_count_as_the_scalar_says(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    guarded = nn.Parameter(torch.randn(5, generator=generator))
    plain = nn.Parameter(guarded.detach().clone())
    optimizers = [OPTIMIZERS[name](p) for p in (guarded, plain)]
    for optimizer in optimizers:
        initialize_state(optimizer)
    for ok in (True, False, True, False, False, True):
        gradient = torch.randn(5, generator=generator)
        guarded.grad = gradient if ok else gradient * torch.nan
        plain.grad = gradient
        before = copy.deepcopy(_state(optimizers[0], guarded))
        undo = step_if(optimizers[0], torch.tensor(ok))
        if ok:
            optimizers[1].step()
        else:
            undo()
            assert all(map(torch.equal, _state(optimizers[0], guarded), before))
        assert all(map(torch.equal, _state(optimizers[0], guarded), _state(optimizers[1], plain)))


def test_states_that_are_made_in_such_a_step_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    for optimizer in (torch.optim.AdamW([parameter]), torch.optim.SGD([parameter], lr=0.1, momentum=0.9)):
        with pytest.raises(ConfigError, match="made new states in a step that may be cancelled"):
            step_if(optimizer, torch.tensor(False))
    plain = torch.optim.SGD([parameter], lr=0.1)
    before = parameter.detach().clone()
    step_if(plain, torch.tensor(False))
    assert torch.equal(parameter, before)
    step_if(plain, torch.tensor(True))
    assert torch.equal(parameter, before - 0.1)


def test_values_are_kept_unless_they_are_wanted() -> None:
    for ok in (True, False):
        x = torch.tensor([1.0, torch.nan])
        keep_unless(torch.tensor(ok), [x], [torch.zeros(2)])
        assert bool(x[1].isnan()) == ok
