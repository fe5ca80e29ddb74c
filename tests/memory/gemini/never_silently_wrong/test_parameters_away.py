"""Parameters that are away are never read as something else, and keep their memory format."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.memory import Gemini, GeminiConfig
from fastfold.memory.gemini.checks import NotCopied
from fastfold.memory.gemini.module_hooks import StateHooks
from tests.memory.gemini.never_silently_wrong.nets import AWAY, POLICIES, Net, adam, backward, managed, x_of


def _ema(model: nn.Module) -> None:
    average = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p, alpha=0.1)


READS: list[Callable[[Net], object]] = [
    lambda model: torch.save(list(model.parameters()), io.BytesIO()),
    torch.no_grad()(lambda model: nn.utils.parameters_to_vector(model.parameters())),
    lambda model: nn.utils.vector_to_parameters(torch.zeros(1000), model.parameters()),
    _ema,
    torch.no_grad()(lambda model: model.head.weight.sum()),
    lambda model: model.head.weight.data,
    lambda model: model.head.weight.detach(),
    torch.no_grad()(lambda model: model.head.weight.tolist()),
    lambda model: model.head.weight.numpy(),
    torch.no_grad()(lambda model: torch.stack([model.scale])),
    lambda model: nn.init.zeros_(model.scale),
    lambda model: model.half(),
]


@pytest.mark.parametrize("policy", AWAY)
@pytest.mark.parametrize("number", range(len(READS)))
def test_what_is_away_raises_when_read(policy: str, number: int) -> None:
    model, manager = managed(policy)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"(head|scale|encoder).*params_on_host\(\).*state_dict\(\)"):
            READS[number](model)
        backward(model)  # the last module's chunk may be on the device now
        manager.step()
        manager.zero_grad()
    for p in model.parameters():
        assert p.shape.numel() == p.numel() and p.dtype == torch.float64 and p.is_leaf  # noqa: PT018
        assert "managed" in repr(p)
    plain = Net()
    optimizer = adam(plain)
    for _ in range(2):
        backward(plain)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_submodule_s_state_dict_is_right(policy: str) -> None:
    plain, (model, _) = Net(), managed(policy)
    for _ in range(2):
        for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
            state = mine.state_dict()
            assert all(torch.equal(x, state[name]) for name, x in theirs.state_dict().items())
        model(x_of())
    twice = {name: 2 * x for name, x in plain.encoder.state_dict().items()}
    model.encoder.load_state_dict(twice)
    assert all(torch.equal(x, twice[name]) for name, x in model.encoder.state_dict().items())
    plain.encoder.load_state_dict(twice)
    assert torch.equal(model(x_of()), plain(x_of()))


@pytest.mark.parametrize("policy", POLICIES)
def test_copying_a_managed_model_says_what_to_do(policy: str) -> None:
    model, manager = managed(policy)
    wrong = (copy.deepcopy, pickle.dumps)
    for attempt in wrong:
        for module in (model, model.encoder, model.head):
            with pytest.raises(ConfigError, match=r"state_dict\(\)|release\(\)"):
                attempt(module)
            with manager.params_on_host(), pytest.raises(ConfigError, match=r"release\(\)"):
                attempt(module)
    with manager.params_on_host():
        assert torch.equal(copy.deepcopy(model.scale), torch.ones(6, dtype=torch.float64))
        assert torch.equal(pickle.loads(pickle.dumps(model.scale)), torch.ones(6, dtype=torch.float64))
    manager.release()
    for attempt in wrong:
        attempt(model)
    assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())


def test_hooks_bring_parameters_once_for_a_module_and_all_within() -> None:
    class Counts:
        inside = most = 0

        def __enter__(self) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)

        def __exit__(self, *_: object) -> None:
            self.inside -= 1

    model, counts = Net(), Counts()
    optimizer = adam(model)
    loaded: list[int] = []
    hooks = StateHooks(model, optimizer, lambda: counts, lambda: loaded.append(counts.inside))  # type: ignore[arg-type, return-value]
    assert isinstance(hooks, NotCopied)
    model.encoder[0].load_state_dict(model.encoder[0].state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert (counts.inside, counts.most, loaded) == (0, 1, [1])
    hooks.remove()
    model.state_dict()
    assert counts.most == 1


def test_gradients_can_be_asked_for_without_keeping_them() -> None:
    plain, (model, _) = Net(), managed()
    found = [
        torch.autograd.grad(net(x_of()).square().sum(), [net.head.weight, net.scale])
        for net in (plain, model)
    ]
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_formats_are_kept(policy: str) -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)).to(memory_format=torch.channels_last)
        optimizer: Any = adam(model)
        run = Gemini(model, optimizer, GeminiConfig(budget=1 << 14, policy=policy)) if wrapped else optimizer
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert model[0].weight.stride() == (27, 1, 9, 3)
        for _ in range(2):
            out = model(torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last))
            out.square().sum().backward()
            run.step()
            run.zero_grad()
        states = [model.state_dict(), *optimizer.state_dict()["state"].values()]
        found.append([{n: (x, x.stride()) for n, x in state.items()} for state in states])
    for plain, mine in zip(*found, strict=True):
        for name, (x, stride) in plain.items():
            assert torch.equal(x, mine[name][0])
            assert stride == mine[name][1]
