"""Steps of tensors in the place of parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastfold.memory.gemini.optimizer.stand_in import check_stand_ins, step_stand_ins


@pytest.mark.parametrize("fresh", [True, False])
def test_a_step_changes_the_numbers_and_the_states_and_nothing_else(fresh: bool) -> None:
    """With states from before or without; the other parameter of the group is left alone."""
    generator = torch.Generator().manual_seed(0)
    first, second = (nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(2))
    optimizer = torch.optim.AdamW([first, second], lr=0.1)
    if not fresh:
        first.grad = torch.randn(3, 2, generator=generator)
        optimizer.step()
        first.grad = None
    before, other = first.detach().clone(), second.detach().clone()
    plain = nn.Parameter(before.clone())
    expected = torch.optim.AdamW([plain], lr=0.05)
    if not fresh:
        expected.state[plain] = copy.deepcopy(optimizer.state[first])
    numbers, gradient = before.clone(), torch.randn(3, 2, generator=generator)
    plain.grad = gradient.clone()
    expected.step()

    groups = [{**optimizer.param_groups[0], "params": [first], "lr": 0.05}]
    step_stand_ins(optimizer, groups, {first: (numbers, gradient)})
    assert torch.equal(numbers, plain)
    assert torch.equal(first, before)
    assert torch.equal(second, other)
    assert first.grad is None
    assert optimizer.param_groups[0]["params"] == [first, second]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert list(optimizer.state) == [first]
    for name, value in expected.state[plain].items():
        assert torch.equal(optimizer.state[first][name], value), name


def test_trying_out_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([parameter])
    check_stand_ins(optimizer)
    assert torch.equal(parameter, torch.ones(2, 2))
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [parameter]
