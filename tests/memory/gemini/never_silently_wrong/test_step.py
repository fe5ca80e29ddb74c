"""A step happens whole, or not at all, or is not gone on from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.memory import BudgetError, Gemini, GeminiConfig, SimulatedDevice
from fastfold.memory.devices.tiers import NvmeTier, Tier
from tests.memory.gemini.never_silently_wrong.nets import POLICIES, Net, adam, backward, managed, x_of


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Allocations of optimizer states left before they fail."""
    left = [1 << 30]
    original = Tier.allocate

    def allocate(self: Tier, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        if what == "optimizer states":
            if not left[0]:
                raise MemoryError("no memory")
            left[0] -= 1
        return original(self, numel, dtype, what)

    reserved = NvmeTier.allocate_kept

    def allocate_kept(self: NvmeTier, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        if what == "optimizer states":
            if not left[0]:
                raise MemoryError("no memory")
            left[0] -= 1
        return reserved(self, numel, dtype, what)

    monkeypatch.setattr(Tier, "allocate", allocate)
    monkeypatch.setattr(NvmeTier, "allocate_kept", allocate_kept)
    return left


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_for_which_there_is_no_room_changes_nothing(policy: str, failing: list[int]) -> None:
    plain, (model, manager) = Net(), managed(policy)
    backward(plain)
    backward(model)
    failing[0] = 3
    with pytest.raises(MemoryError):
        manager.step()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())
    assert not manager.optimizer.state  # type: ignore[union-attr]
    failing[0] = 1 << 30
    adam(plain).step()
    manager.step()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


def test_states_that_do_not_fit_on_the_device_change_nothing() -> None:
    model = Net()
    optimizer = adam(model)
    device = SimulatedDevice(1 << 16)
    manager = Gemini(model, optimizer, GeminiConfig(1 << 16, "cuda", device=device))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    backward(model)
    device.budget = device.used + 1500
    with pytest.raises(BudgetError, match="optimizer states"):
        manager.step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_step_that_fails_half_way_is_not_gone_on_from() -> None:
    model, manager = managed()
    saved = copy.deepcopy(manager.state_dict())
    backward(model)
    optimizer = manager.optimizer
    assert optimizer is not None
    calls = []

    def fail(*_: object) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        manager.step()
    handle.remove()
    for attempt in (manager.step, manager.state_dict):
        with pytest.raises(ConfigError, match=r"failed half way.*load_state_dict\(\)"):
            attempt()
    manager.load_state_dict(saved)
    manager.step()


def test_a_checkpoint_is_gone_on_from_after_a_backward_pass_that_raised() -> None:
    """Parameters that were in use when it raised are not in use any more."""

    def fail(_: Tensor) -> None:
        raise MemoryError("no memory")

    model, manager = managed()
    saved = copy.deepcopy(manager.state_dict())
    hidden = model.encoder(x_of())
    hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        model.head(hidden).sum().backward()
    manager.load_state_dict(saved)
    assert all(torch.equal(x, saved["model"][name]) for name, x in model.state_dict().items())
