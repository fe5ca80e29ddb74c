"""What an optimizer keeps, and whether it treats each parameter alone, found out without a step of the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.memory.gemini.optimizer.probe import check_steps_alone, state_bytes, state_kinds


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


@pytest.mark.parametrize(
    ("optimizer", "options", "size"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 4),
        (torch.optim.AdamW, {}, 8),
        (torch.optim.AdamW, {"amsgrad": True}, 12),
        (torch.optim.RMSprop, {}, 4),
    ],
)
def test_bytes_of_states_are_those_of_a_step(
    optimizer: type[torch.optim.Optimizer], options: dict[str, object], size: int
) -> None:
    """Found out without a step of the model's own, and counted once there was one."""
    model = _model()
    made = optimizer(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    before = copy.deepcopy(model.state_dict())
    assert state_bytes(made) == size
    assert not made.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.ones(1, 8)).sum().backward()
    made.step()
    assert state_bytes(made) == size


class _Mixed(torch.optim.SGD):
    """Keeps a state of a type of its own, one of another size, and numbers on the optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.seen.append(p.numel())
                self.state[p] = {
                    "master": p.detach().float(),
                    "average": p.detach().clone(),
                    "scale": torch.ones(1),
                    "step": torch.zeros(()),
                }


def test_states_have_the_parameter_s_type_or_their_own() -> None:
    optimizer = _Mixed(_model().bfloat16().parameters())
    kinds = {"master": torch.float32, "average": None}
    assert state_kinds(optimizer, optimizer.param_groups[0]) == kinds
    assert state_bytes(optimizer) == 6
    assert optimizer.seen == []
    assert not optimizer.state
    optimizer.step()
    assert state_kinds(optimizer, optimizer.param_groups[0]) == kinds


def test_groups_of_one_parameter_and_of_none() -> None:
    model = _model()
    groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    check_steps_alone(optimizer)
    optimizer.param_groups[0]["params"] = []
    check_steps_alone(optimizer)
    assert state_bytes(optimizer) == 8


def test_one_number_of_a_group_is_noticed_though_parameters_do_not_show_it() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1

    optimizer = Counts(_model().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="Counts cannot be managed"):
        check_steps_alone(optimizer)
    assert "k" not in optimizer.param_groups[0]


class _Early(torch.optim.Optimizer):
    """Makes its states before the first step and at no other time, as PyTorch 2.11's Adagrad does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {
                "sum": torch.full_like(p, 0.1),
                "step": torch.zeros(()),
                "wide": p.detach().double(),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["step"] += 1
                p.addcdiv_(p.grad, state["sum"].add_(p.grad.square()).sqrt() + 1e-10, value=-0.1)


def test_states_that_are_there_before_the_first_step_are_those_of_the_probes() -> None:
    """The optimizer's own stay as they are."""
    optimizer = _Early(_model().bfloat16().parameters())
    check_steps_alone(optimizer)
    assert state_bytes(optimizer) == 10
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert (state["sum"] == torch.tensor(0.1).bfloat16()).all()


def test_states_of_other_shapes_are_made_anew_on_probes() -> None:
    """An optimizer that has stepped before it is managed, with factored moments."""
    model = _model()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    check_steps_alone(optimizer)
