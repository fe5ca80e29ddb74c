"""Steps with a varying number of passes in one call: bits of the plain run, one trace, no walks over parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fastfold.memory import Gemini, GeminiConfig, SimulatedDevice
from fastfold.memory.gemini.managed_parameter import ManagedParameter

RECYCLES = (1, 3, 0, 2, 2, 0, 3, 1)


class Recycling(nn.Module):
    """Layers that three projections share an input of, run several times; the last time records gradients."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = nn.Linear(16, 16), nn.Linear(16, 200)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(layers))

    def once(self, x: Tensor) -> Tensor:
        for query, key, value in self.layers:
            x = x + torch.softmax(query(x) @ key(x).T, -1) @ value(x)
        return x

    def forward(self, x: Tensor, recycles: int) -> Tensor:
        previous = torch.zeros_like(x)
        for _ in range(recycles):
            with torch.no_grad():
                previous = self.once(self.first(x) + previous)
        return self.once(self.first(x) + previous)


def _x(step: int, rows: int = 48) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))


def _bytes_of_a_plain_step(model: nn.Module) -> int:
    device, plain = SimulatedDevice(1 << 40), copy.deepcopy(model)
    with device.running():
        plain(_x(0), 0).square().mean().backward()
    return device.mark() + sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("share", [1.1, 0.6])
def test_varying_recycles_are_bit_equal_and_recorded_once(share: float) -> None:
    plain, model = Recycling(), Recycling()
    own, other = (torch.optim.Adam(net.parameters(), lr=1e-2) for net in (plain, model))
    budget = int(share * _bytes_of_a_plain_step(model))
    manager = Gemini(model, other, GeminiConfig(budget, device="cpu"))
    for step, recycles in enumerate(RECYCLES):
        expected = plain(_x(step), recycles).square().mean()
        expected.backward()
        own.step()
        own.zero_grad()
        reacted = manager.residency.reacted
        with manager.device.running():
            loss = model(_x(step), recycles).square().mean()
            loss.backward()
        manager.step()
        manager.zero_grad()
        assert torch.equal(loss, expected)
        assert (manager.residency.reacted > reacted) == (step == 0)
    assert manager.device.peak <= budget
    assert len(manager.residency.book) == 1
    for name, x in manager.state_dict()["model"].items():
        assert torch.equal(x, plain.state_dict()[name])


def test_a_budget_for_all_keeps_all_and_a_tensor_moves_once() -> None:
    """The first step sends each saved tensor once; when its memory is known, nothing is sent."""
    model = Recycling()
    budget = int(1.25 * _bytes_of_a_plain_step(model))
    manager = Gemini(model, torch.optim.Adam(model.parameters()), GeminiConfig(budget, device="cpu"))
    assert manager.saved is not None
    sent = []
    for step in range(5):
        before = manager.saved.sent
        with manager.device.running():
            model(_x(step), 1).square().mean().backward()
        manager.step()
        manager.zero_grad()
        sent.append(manager.saved.sent - before)
    rows, square = 48 * 16 * 4, 48 * 48 * 4
    # The input of the first layer, then for each layer: x, the query, the key, the value, the softmax as the output of
    # an operator and as the input of the next; at last the squared result.
    assert sent[0] <= 2 * rows + 3 * (4 * rows + 2 * square)
    assert sent[-1] == 0


class Direct(Recycling):
    """The same, whose layers are called by other functions than their own."""

    def once(self, x: Tensor) -> Tensor:
        for query, key, value in self.layers:
            q, k, v = (nn.functional.linear(x, layer.weight, layer.bias) for layer in (query, key, value))
            x = x + torch.softmax(q @ k.T, -1) @ v
        return x


def test_a_step_that_first_shows_a_module_s_chunks_is_not_followed() -> None:
    """Its first pass loads each chunk at its use, the later ones with the module: another order of accesses."""
    model = Direct()
    budget = int(1.25 * _bytes_of_a_plain_step(model))
    manager = Gemini(model, torch.optim.Adam(model.parameters()), GeminiConfig(budget, device="cpu"))
    reacted = []
    for step, recycles in enumerate((2, 1, 2, 3, 0)):
        before = manager.residency.reacted
        with manager.device.running():
            model(_x(step), recycles).square().mean().backward()
        manager.step()
        manager.zero_grad()
        reacted.append(manager.residency.reacted - before)
    assert reacted[0] > reacted[1] > 0
    assert reacted[2:] == [0, 0, 0]


def test_functions_seen_do_not_grow_with_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only functions of parameters are seen: for each layer a few, however many layers share its chunk."""
    calls = []
    seen = ManagedParameter.__torch_function__.__func__  # type: ignore[attr-defined]

    def counted(cls: type, func: object, *rest: object) -> object:
        calls.append(func)
        return seen(cls, func, *rest)

    monkeypatch.setattr(ManagedParameter, "__torch_function__", classmethod(counted))
    for layers in (3, 12):
        model = Recycling(layers)
        manager = Gemini(model, torch.optim.SGD(model.parameters()), GeminiConfig("1MiB", device="cpu"))
        assert max(len(chunk.slots) for chunk in manager.store.chunks) > 2 * layers
        for step in range(3):
            calls.clear()
            with manager.device.running():
                model(_x(step), 1).square().mean().backward()
            manager.step()
            manager.zero_grad()
        # One linear operator for each layer and pass, and the rank of the parameter that probes the optimizer.
        assert len(calls) <= 2 * (1 + 3 * layers) + 1
