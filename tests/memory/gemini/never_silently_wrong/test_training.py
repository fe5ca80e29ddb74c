"""What a model trains by: its parameters, one manager, and an optimizer that treats them one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.memory import Gemini, GeminiConfig
from fastfold.memory.gemini.checks import check_model
from tests.memory.gemini.never_silently_wrong.nets import POLICIES, Net, adam, backward, managed


@pytest.mark.parametrize("policy", POLICIES)
def test_what_would_never_train_is_refused_at_the_step(policy: str) -> None:
    model, manager = managed(policy)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.requires_grad_(False)  # and back: the usual way to evaluate
    model.encoder.requires_grad_(True)
    model.head.requires_grad_(True)
    model.scale.requires_grad_(True)
    backward(model)
    model.frozen.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"frozen\.weight was made to train.*release\(\)"):
        manager.step()
    model.frozen.weight.requires_grad_(False)
    head = model.head
    model.head = nn.Linear(6, 2).double()
    with pytest.raises(ConfigError, match=r"head\.weight was put into the model.*release\(\)"):
        manager.step()
    model.head = head
    assert manager.optimizer is not None
    manager.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="parameters that the model does not have"):
        manager.step()
    del manager.optimizer.param_groups[-1]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    manager.step()
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_has_one_manager(policy: str) -> None:
    model, manager = managed(policy)
    for part in (model, model.encoder):
        with pytest.raises(ConfigError, match=r"managed already.*release\(\)"):
            Gemini(part, config=GeminiConfig(budget=1 << 14, policy=policy))
    manager.release()
    check_model(model, None)
    Gemini(model, config=GeminiConfig(budget=1 << 14, policy=policy))


class Counting(torch.optim.SGD):
    """Keeps a number of a whole group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"] / group["k"])


class Global(torch.optim.SGD):
    """Looks at all gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        super().step()


@pytest.mark.parametrize("kind", [Counting, Global, torch.optim.LBFGS])
def test_optimizers_that_do_not_treat_parameters_alone_are_refused(kind: Any) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=f"{kind.__name__} .*one chunk of parameters after the other"):
        Gemini(model, kind(model.parameters(), lr=0.1), GeminiConfig(budget=1 << 14))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    ],
)
def test_the_optimizers_of_pytorch_step_as_ever(kind: Any, options: dict[str, object]) -> None:
    plain, model = Net(), Net()
    optimizer = kind(plain.parameters(), lr=0.01, **options)
    manager = Gemini(model, kind(model.parameters(), lr=0.01, **options), GeminiConfig(budget=1 << 14))
    torch.optim.lr_scheduler.StepLR(manager.optimizer, 1)  # replaces the optimizer's step
    for step in range(3):
        for net, run in ((plain, optimizer), (model, manager)):
            backward(net, step)
            run.step()
            run.zero_grad()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


class Bounded(nn.Module):
    """Weights that every forward pass changes: rows of at most a norm, bounds, through ``.data`` and in new memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 6, max_norm=0.5)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        self.second.weight.data.clamp_(-0.1, 0.1)
        self.second.bias.data = self.second.bias.data.clamp(-0.1, 0.1)
        return self.second(self.first(self.table(ids)))  # type: ignore[no-any-return]


@torch.no_grad()
def _halve_by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0.5 * vector, model.parameters())


def _halve_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = 0.5 * p.data


@torch.no_grad()
def _transpose(model: nn.Module) -> None:
    model.frozen.weight.data = model.frozen.weight.data.mT  # type: ignore[union-attr]
    model.scale.set_((0.5 * model.scale).contiguous())  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", [_halve_by_vector, _halve_data, _transpose])
def test_weights_that_get_new_memory_on_the_host_are_those_of_an_unmanaged_run(
    change: Callable[[nn.Module], None], policy: str
) -> None:
    plain, (model, manager) = Net(), managed(policy)
    optimizer = adam(plain)
    for step in range(4):
        for net, run in ((plain, optimizer), (model, manager)):
            if step == 1:
                with manager.params_on_host() if net is model else nullcontext():
                    change(net)
            backward(net, step)
            if step == 2:
                with manager.params_on_host() if net is model else nullcontext():
                    change(net)
            run.step()
            run.zero_grad()
    assert all(
        torch.allclose(x, model.state_dict()[name], atol=1e-12) for name, x in plain.state_dict().items()
    )


def _shorten(model: Net) -> None:
    model.scale.data = model.scale.data[:3]


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_get_another_dtype_or_shape_are_refused_and_kept(policy: str) -> None:
    model, manager = managed(policy)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for change, message in (
        (nn.Module.float, r"has become .* of torch\.float32.*release\(\)"),
        (_shorten, r"scale has become \[3\] of torch\.float64, and its manager keeps \[6\]"),
    ):
        with pytest.raises(ConfigError, match=message), manager.params_on_host():
            change(model)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in before.items())
    backward(model)
    manager.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_forward_changes_are_those_of_an_unmanaged_run(policy: str) -> None:
    ids = torch.arange(5)
    plain = Bounded()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.05)
    model = copy.deepcopy(plain)
    manager = Gemini(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), GeminiConfig(budget=1 << 14, policy=policy)
    )
    for _ in range(3):
        plain(ids).square().sum().backward()
        expected.step()
        expected.zero_grad()
        with manager.device.running():
            model(ids).square().sum().backward()
        manager.step()
        manager.zero_grad()
    for name, x in model.state_dict().items():
        assert torch.equal(x, plain.state_dict()[name]), name


def test_sparse_gradients_are_refused_at_the_start() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    with pytest.raises(ConfigError, match=r"0 has sparse gradients.*sparse=False"):
        Gemini(model, torch.optim.SGD(model.parameters(), lr=0.1), GeminiConfig(budget=1 << 14))


class Warming(torch.optim.SGD):
    """Looks at all gradients together after some steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        if self.param_groups[0]["k"] > 8:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            scale = float(sum(g.square().sum() for g in gradients)) ** -0.5
            for g in gradients:
                g.mul_(scale)
        super().step()


def test_an_optimizer_that_looks_at_all_gradients_later_is_refused() -> None:
    model = Net()
    with pytest.raises(ConfigError, match="Warming cannot be managed"):
        Gemini(model, Warming(model.parameters(), lr=0.1), GeminiConfig(budget=1 << 14))
