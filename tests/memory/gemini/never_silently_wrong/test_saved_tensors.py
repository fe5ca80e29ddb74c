"""What a backward pass needs is there unchanged, or its change is noticed, and nothing else is kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory import Gemini, GeminiConfig, SimulatedDevice
from tests.memory.gemini.never_silently_wrong.nets import AWAY, POLICIES, Net, adam, backward, managed, x_of


class Overwrites(nn.Module):
    """Changes in place what a backward pass needs, if told to."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.after = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor, overwrite: bool) -> Tensor:
        y = self.layer(x).exp()
        z = self.after(y.sin())
        if overwrite:
            with torch.no_grad():
                y.mul_(2)
        return z


@pytest.mark.parametrize("size", [4, 32])  # small tensors are not moved
@pytest.mark.parametrize("budget", [1 << 14, 1 << 22])
@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_what_is_changed_in_place_is_noticed(policy: str | None, budget: int, size: int) -> None:
    model = Overwrites(size)
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(1))
    manager = None
    if policy is not None:
        manager = Gemini(
            model, config=GeminiConfig(budget=1 << 22 if policy == "cuda" else budget, policy=policy)
        )
    for _ in range(3):  # after the first step more is kept on the device
        model(x, False).sum().backward()
        (manager or model).zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x, True).sum().backward()
        (manager or model).zero_grad()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_between_forward_and_backward_is_noticed(policy: str) -> None:
    for net, manager in ((Net(), None), managed(policy)):
        optimizer: Any = manager or adam(net)
        backward(net)
        loss = net(x_of()).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("policy", AWAY)
def test_forwards_without_backward_leave_nothing(policy: str, recompute: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid()) for _ in range(3)))
    device = SimulatedDevice(1 << 20)
    manager = Gemini(
        model,
        adam(model),
        GeminiConfig(1 << 20, policy, device=device, recompute=list(model) if recompute else ()),
    )
    with device.running():
        for _ in range(3):
            model(torch.randn(16, 32)).sum().backward()
            manager.step()
            manager.zero_grad()
        gc.collect()
        before = device.other_bytes(), manager.store.host.used
        for _ in range(6):
            out = model(torch.randn(16, 32))
            assert out.requires_grad
            del out
        gc.collect()
        assert (device.other_bytes(), manager.store.host.used) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_second_derivatives_are_right_or_refused(policy: str) -> None:
    def second(net: Net) -> Tensor:
        x = x_of().requires_grad_()
        (first,) = torch.autograd.grad(net.encoder(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    model, _ = managed(policy)
    if policy == "cuda":
        assert torch.equal(second(model), second(Net()))
    else:
        with pytest.raises(ConfigError, match=r"create_graph=True.*policy 'cuda'"):
            second(model)
