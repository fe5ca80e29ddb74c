"""Chunks on the host are the truth; what is not on the device cannot be read, and nothing of it is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory import BudgetError, SimulatedDevice, Tier
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import ChunkState, build_chunks
from fastfold.memory.gemini.managed_parameter import untouched


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def _store(model: nn.Module, budget: int = 10_000) -> ChunkStore:
    """One chunk for each layer, 8 * 8 + 8 numbers padded to 80."""
    return ChunkStore(build_chunks(model, largest=1), SimulatedDevice(budget), Tier())


def _compute(store: ChunkStore, index: int) -> None:
    store.load(index)
    store.chunks[index].become(ChunkState.COMPUTE)


def test_parameters_come_and_go() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    store = _store(model)
    assert len(store.chunks) == 3
    assert store.device.used == 0
    assert all(p.shape == q.shape for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    with torch.no_grad(), pytest.raises(ConfigError, match=r"1\.weight is managed and not on the device"):
        model[1].weight.isnan()
    assert not model[1].weight.isnan().any()
    _compute(store, 1)
    assert store.resident == {1}
    assert store.chunk_of(model[1].bias) is store.chunks[1]
    assert store.chunk_of(nn.Parameter(torch.ones(1))) is None
    assert torch.equal(model[1].weight, plain[1].weight)
    with untouched():
        assert model[0].weight.isnan().all()
    assert store.device.used == store.chunks[1].nbytes == 80 * 4
    store.chunks[1].idle()
    store.evict(1)
    assert (store.resident, store.device.used, store.loads) == (frozenset(), 0, 1)
    with untouched():
        assert model[1].weight.isnan().all()
    with untouched(), pytest.raises(RuntimeError, match="single memory location"):
        model[1].weight.data.add_(1)  # what is away cannot be changed without notice
    store.release()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_chunk_that_does_not_fit_names_what_is_needed() -> None:
    store = _store(_model(), budget=2 * 320 + 10)
    for index in range(2):
        store.load(index)
    with pytest.raises(
        BudgetError, match=r"a budget of 650 bytes is too small.*This operator needs at least 960"
    ) as caught:
        store.load(2)
    assert caught.value.smallest == 960
    assert store.resident == {0, 1}


def test_gradients_add_up_on_the_host() -> None:
    model = _model()
    store = _store(model)
    parameter, grad = model[1].bias, torch.arange(8.0)
    _compute(store, 1)
    for _ in range(2):
        parameter.grad = grad.clone()
        store.take_gradient(parameter)
        assert parameter.grad is None
    assert store.chunks[1].arrived == {"1.bias"}
    store.chunks[1].idle()
    with store.params_on_host():
        assert torch.equal(parameter.grad, 2 * grad)
        assert model[1].weight.grad is None
    store.clear_gradients()
    assert store.chunks[1].state is ChunkState.FREE
    assert not store.chunks[1].arrived
    # After that a gradient is what comes, not what was there.
    _compute(store, 1)
    parameter.grad = grad.clone()
    store.take_gradient(parameter)
    store.chunks[1].idle()
    assert store.chunks[1].state is ChunkState.HOLD_AFTER_BACKWARD
    with store.params_on_host():
        assert torch.equal(parameter.grad, grad)


def test_gradients_of_what_is_away_or_sparse_are_refused() -> None:
    model = _model()
    store = _store(model)
    with untouched():
        model[0].weight.grad = torch.ones(8, 8)  # as a backward pass does
    with pytest.raises(RuntimeError, match=r"used 0\.weight while it was not on the device"):
        store.take_gradient(model[0].weight)
    _compute(store, 0)
    model[0].weight.grad = torch.ones(8, 8).to_sparse()
    with pytest.raises(ConfigError, match=r"0\.weight has sparse gradients.*sparse=False"):
        store.take_gradient(model[0].weight)


def test_what_is_changed_on_the_host_comes_to_the_device() -> None:
    """Stale copies leave it, and a gradient that is set or taken away there counts."""
    model = _model()
    store = _store(model)
    for index in range(2):
        store.load(index)
    with store.params_on_host(store.chunks[:1]), store.params_on_host(), torch.no_grad():
        model[0].weight.fill_(3.0)
        model[0].bias.grad = torch.full((8,), 5.0)
    assert store.resident == {1}
    _compute(store, 0)
    assert (model[0].weight == 3.0).all()
    assert store.chunks[0].arrived == {"0.bias"}
    store.chunks[0].idle()
    with store.params_on_host():
        assert model[0].bias.grad.tolist() == [5.0] * 8
        model[0].bias.grad = None
    assert not store.chunks[0].arrived


def test_states_of_the_optimizer_live_with_the_host() -> None:
    model = _model()
    store = _store(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with store.params_on_host():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    before = {p: dict(s) for p, s in optimizer.state.items()}
    used = store.host.used
    for _ in range(2):  # what is there stays
        store.settle_states(store.chunks[0], optimizer)
        assert store.host.used == used + 2 * store.chunks[0].nbytes
    first = optimizer.state[model[0].weight]
    assert torch.equal(first["exp_avg"], before[model[0].weight]["exp_avg"])
    assert first["exp_avg"].data_ptr() != before[model[0].weight]["exp_avg"].data_ptr()
    assert first["step"] is before[model[0].weight]["step"]
    assert optimizer.state[model[1].weight]["exp_avg"] is before[model[1].weight]["exp_avg"]


def test_a_count_of_steps_stays_where_it_is_also_beside_a_single_number() -> None:
    model = nn.Module()
    model.factor = nn.Parameter(torch.tensor(2.0))
    store = _store(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with store.params_on_host():
        model.factor.grad = torch.tensor(1.0)
        optimizer.step()
    step = optimizer.state[model.factor]["step"]
    store.settle_states(store.chunks[0], optimizer)
    assert optimizer.state[model.factor]["step"] is step


def test_on_the_device_itself_nothing_moves() -> None:
    model = _model()
    plain: list[Tensor] = [p.clone() for p in model.parameters()]
    device = SimulatedDevice(2_000)
    store = ChunkStore(build_chunks(model, largest=1), device, device)
    assert store.fixed
    assert store.resident == {0, 1, 2}
    assert store.loads == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain, strict=True))
    with store.params_on_host():
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain, strict=True))
    assert store.resident == {0, 1, 2}
    for index in range(3):
        store.gradient(store.chunks[index])
    small = SimulatedDevice(600)
    with pytest.raises(BudgetError, match=r"policy 'cuda' keeps parameters on the device.*Policy 'auto'"):
        ChunkStore(build_chunks(_model(), largest=1), small, small)


class _EmptyingDevice(SimulatedDevice):
    """Its buffers give their memory back, as a GPU's do: views of them cannot be made in between."""

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = super().reserve(numel, dtype)
        buffer.untyped_storage().resize_(0)
        return buffer

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        buffer.untyped_storage().resize_(buffer.nbytes)
        super().fill(buffer, source)

    def drop(self, buffer: Tensor) -> None:
        super().drop(buffer)
        buffer.untyped_storage().resize_(0)


def test_parameters_come_to_buffers_that_had_no_memory() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    store = ChunkStore(build_chunks(model, largest=1), _EmptyingDevice(10_000), Tier())
    for _ in range(2):
        _compute(store, 1)
        assert torch.equal(model[1].weight, plain[1].weight)
        store.chunks[1].idle()
        store.evict(1)
