"""Which operator runs now: forward, recomputed, and in the backward pass, without a word from the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.memory import SimulatedDevice, Tier
from fastfold.memory.gemini.access_trace import PassKey
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import ChunkState, build_chunks
from fastfold.memory.gemini.module_hooks import ModuleHooks


class _Everything:
    """In place of the manager's decisions: what is asked for comes and stays, and every call is noted."""

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        self._pins: Counter[int] = Counter()
        self.passes: list[PassKey] = []
        self.events: list[str] = []

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(+self._pins)

    def begin_pass(self, key: PassKey, elements: int) -> None:
        self.passes.append(key)
        self.events.append(f"begin {key.module or 'model'}")

    def end_pass(self) -> None:
        self.events.append("end")

    def forget_cycle(self) -> None:
        self.events.append("forget")

    def pin(self, chunks: tuple[int, ...], release: tuple[int, ...] = ()) -> None:
        for index in release:
            self._pins[index] -= 1
            if index not in self.pinned:
                self.store.chunks[index].idle()
        for index in chunks:
            if index not in self.store.resident:
                self.store.load(index)
            if index not in self.pinned:
                self.store.chunks[index].become(ChunkState.COMPUTE)
            self._pins[index] += 1
        self.events += [f"-{index}" for index in release] + [f"+{index}" for index in chunks]


class Net(nn.Module):
    """Two layers, the second of them recomputed if asked for, and a bias that the model adds itself."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recompute = nn.Linear(4, 4), nn.Linear(4, 4), recompute
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor, tied: bool = False) -> dict[str, Any]:
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=False) if self.recompute else self.second(x)
        return {"out": [x @ self.spare.weight if tied else x]}


def _hooked(model: nn.Module) -> tuple[_Everything, ModuleHooks, dict[str, int]]:
    """With the number of each layer's chunk."""
    store = ChunkStore(build_chunks(model, largest=1), SimulatedDevice(1 << 20), Tier())
    residency = _Everything(store)
    hooks = ModuleHooks(model, store, residency, None)  # type: ignore[arg-type]
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    numbers = {}
    for name, layer in layers.items():
        chunk = store.chunk_of(layer.weight)
        assert chunk is not None
        numbers[name] = chunk.index
    return residency, hooks, numbers


def test_a_layer_s_chunk_is_there_while_it_runs_and_comes_back_in_reverse() -> None:
    model = Net()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    residency, _, at = _hooked(model)
    first, second = at["first"], at["second"]
    x = torch.randn(2, 4)
    out = model(x)["out"][0]
    forward = ["begin model", f"+{first}", f"-{first}", f"+{second}", f"-{second}", "end"]
    assert residency.events == forward
    assert residency.passes[0].shapes == ((2, 4),)
    residency.events.clear()
    out.square().sum().backward()
    assert residency.events == [f"+{second}", f"-{second}", f"+{first}", f"-{first}"]
    assert not residency.pinned
    plain(x)["out"][0].square().sum().backward()
    with residency.store.params_on_host():
        for name in ("first", "second"):
            assert torch.equal(getattr(model, name).weight.grad, getattr(plain, name).weight.grad)
            assert torch.equal(getattr(model, name).bias.grad, getattr(plain, name).bias.grad)
    with pytest.raises(ConfigError, match=r"gradient of first\.weight"):
        _ = model.first.weight.grad  # none stays on the device, which is not to be taken for none at all


class Fused(nn.Module):
    """No parameters of its own: one operator takes those of a module within."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias).tanh()


def test_a_layer_that_uses_its_children_s_parameters_is_what_needs_them() -> None:
    """And not the model, which would need those of all layers until its end."""
    model = nn.Sequential(Fused(), Fused())
    residency, _, at = _hooked(model)
    first, second = at["0.linear"], at["1.linear"]
    model(torch.randn(2, 4)).sum().backward()
    one, two = [f"+{first}", f"-{first}"], [f"+{second}", f"-{second}"]
    assert residency.events == ["begin model", "forget", *one, "forget", *two, "end", *two, *one]


def test_a_parameter_that_another_module_uses_is_brought_and_remembered() -> None:
    """The model multiplies with its child's weight; the next time that is known from the start of its call."""
    model = Net()
    residency, _, at = _hooked(model)
    assert model(torch.randn(2, 4), tied=True)["out"][0].isfinite().all()
    spare = f"+{at['spare']}"
    assert residency.events.index(spare) > residency.events.index(f"-{at['second']}")
    assert residency.events[-2:] == [f"-{at['spare']}", "end"]
    residency.events.clear()
    model(torch.randn(2, 4), tied=True)
    assert residency.events[:2] == ["begin model", spare]
    assert residency.events.count(spare) == 1


def test_asking_for_a_shape_brings_nothing() -> None:
    class Asks(Net):
        def forward(self, x: Tensor, tied: bool = False) -> Tensor:
            assert self.spare.weight.shape == (4, 4)
            assert self.spare.weight.is_floating_point()
            out: Tensor = self.first(x.to(self.spare.weight.dtype))
            return out

    model = Asks()
    residency, _, at = _hooked(model)
    model(torch.randn(2, 4))
    assert f"+{at['first']}" in residency.events
    assert f"+{at['spare']}" not in residency.events


def test_a_recomputed_layer_belongs_to_the_pass_whose_gradients_are_computed() -> None:
    model = Net(recompute=True)
    residency, _, at = _hooked(model)
    loss = model(torch.randn(2, 4, requires_grad=True))["out"][0].sum()
    residency.events.clear()
    loss.backward()
    assert not any(event.startswith(("begin", "end")) for event in residency.events)
    assert residency.events.count(f"+{at['second']}") >= 1
    assert not residency.pinned


def test_evaluation_and_inner_calls_are_passes_of_their_own() -> None:
    model = Net().eval()
    residency, _, at = _hooked(model)
    with torch.no_grad():
        model.second(torch.randn(1, 4))
    assert residency.events == ["begin second", f"+{at['second']}", f"-{at['second']}", "end"]
    assert residency.passes[0].evaluation


def test_a_call_that_raises_ends_and_the_next_one_begins() -> None:
    model = Net()
    residency, _, _ = _hooked(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 5))
    assert residency.events[-1] == "end"
    residency.events.clear()
    model(torch.randn(2, 4))
    assert (residency.events[0], residency.events[-1]) == ("begin model", "end")


def test_without_hooks_nothing_is_noted() -> None:
    model = Net()
    residency, hooks, _ = _hooked(model)
    hooks.remove()
    residency.store.release()
    model(torch.randn(2, 4))["out"][0].sum().backward()
    assert residency.events == []
    assert model.first.weight.grad is not None
