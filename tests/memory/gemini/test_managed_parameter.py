"""Terms of a loss that read managed parameters outside of modules: right in every policy, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory import Gemini, GeminiConfig

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())  # type: ignore[no-any-return]


def _orthogonality(net: nn.Module) -> Tensor:
    weight: Any = net.first.weight
    return (weight.T @ weight - torch.eye(8)).square().sum()  # type: ignore[no-any-return]


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "squares": lambda net: sum((p.square().sum() for p in net.parameters()), torch.zeros(())),
    "largest": lambda net: net.second.weight.abs().amax() + net.first.bias[2:].norm(),
    "orthogonality": _orthogonality,
    "functional": lambda net: nn.functional.linear(X, net.first.weight, net.first.bias).sin().sum(),
}


def _train(
    net: nn.Module, penalty: Callable[[nn.Module], Tensor], policy: str | None, before: bool
) -> Gemini | None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    manager = None if policy is None else Gemini(net, optimizer, GeminiConfig("4MiB", policy))
    step: Any = optimizer if manager is None else manager
    for _ in range(3):
        first = penalty(net) if before else 0.0
        (net(X).square().mean() + 0.01 * (first + (0.0 if before else penalty(net)))).backward()
        step.step()
        step.zero_grad()
    return manager


@pytest.mark.parametrize("policy", ["cpu", "auto", "cuda"])
@pytest.mark.parametrize("before", [False, True], ids=["after the pass", "before the pass"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_of_weights_trains_as_without_a_manager(name: str, before: bool, policy: str) -> None:
    plain, net = _Net(), _Net()
    _train(plain, PENALTIES[name], None, before)
    manager = _train(net, PENALTIES[name], policy, before)
    assert manager is not None
    for key, x in manager.state_dict()["model"].items():
        torch.testing.assert_close(x, plain.state_dict()[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("between", [False, True], ids=["before the term", "before the backward pass"])
def test_hooks_that_would_miss_the_gradient_of_a_term_are_refused(between: bool) -> None:
    net = _Net()
    Gemini(net, torch.optim.SGD(net.parameters(), lr=0.1), GeminiConfig("4MiB", "cpu"))

    def loss() -> Tensor:
        return net(X).square().mean() + net.first.weight.square().sum()

    of_hook = "a hook on the gradient of first.weight"
    if between:
        total = loss()
        hook = net.first.weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(ConfigError, match=of_hook):
            total.backward()
    else:
        hook = net.first.weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(ConfigError, match=of_hook):
            loss()
    hook.remove()
    loss().backward()


def _change(call: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    return lambda net: call(net.first.weight)


@pytest.mark.parametrize(
    "use",
    [
        _change(lambda p: p.mul_(2)),
        _change(lambda p: p.__setitem__(0, 0.0)),
        _change(lambda p: p.__imul__(2)),
        _change(lambda p: p.data),
        _change(lambda p: p.detach()),
        _change(lambda p: torch.sin(X, out=p)),
        _change(lambda p: p.fill_(0)),
        _change(nn.init.zeros_),
        _change(torch.no_grad()(lambda p: p.square())),
    ],
)
def test_changes_and_reads_without_gradients_are_refused(use: Callable[[nn.Module], None]) -> None:
    net = _Net()
    Gemini(net, torch.optim.SGD(net.parameters(), lr=0.1), GeminiConfig("4MiB", "cpu"))
    with pytest.raises(ConfigError, match=r"first\.weight is managed and not on the device"):
        use(net)


def test_frozen_parameters_changed_copies_and_second_derivatives_are_refused() -> None:
    net = _Net()
    net.first.bias.requires_grad_(False)
    Gemini(
        net,
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
        GeminiConfig("4MiB", "cpu"),
    )
    with pytest.raises(ConfigError, match=r"first\.bias is managed"):
        net.first.bias.square()
    changed = net.first.weight.view(-1)
    changed.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        changed.sum().backward()
    with pytest.raises(ConfigError, match=r"create_graph=True does not reach first\.weight"):
        net.first.weight.square().sum().backward(create_graph=True)
