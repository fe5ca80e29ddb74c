"""The budget of a GPU, kept by PyTorch's allocator: its functions are stand-ins here, with a GPU of 80 GiB."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.memory import BudgetError, CudaDevice, Gemini, GeminiConfig, SimulatedDevice, Tier
from fastfold.memory.devices.device import DeviceFull
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import build_chunks
from fastfold.utils.units import GIB


class Allocator:
    """What PyTorch's allocator knows."""

    def __init__(self) -> None:
        self.fraction, self.reserved, self.emptied = 1.0, 0, 0

    def set_fraction(self, fraction: float, device: torch.device) -> None:
        assert device == torch.device("cuda:0")
        self.fraction = fraction

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    stand_ins: dict[str, Any] = {
        "Stream": lambda device: None,
        "empty_cache": made.empty,
        "memory_reserved": lambda device: made.reserved,
        "memory_allocated": lambda device: 3000,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda device: made.fraction,
        "set_per_process_memory_fraction": made.set_fraction,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def device(budget: int) -> CudaDevice:
    return CudaDevice(budget, torch.device("cuda:0"))


def test_the_limit_is_the_budget_until_it_is_undone(allocator: Allocator) -> None:
    """What is cached from before is given back first: it counts."""
    undo = device(20 * GIB).enforce()
    assert allocator.fraction == 0.25
    assert allocator.emptied == 1
    undo()
    assert allocator.fraction == 1.0


def test_no_limit_is_made_wider(allocator: Allocator) -> None:
    """Neither one that somebody else has set, nor by a budget larger than the GPU."""
    allocator.fraction = 0.1
    undo = device(20 * GIB).enforce()
    assert allocator.fraction == 0.1
    undo()
    assert allocator.fraction == 0.1
    allocator.fraction = 1.0
    device(100 * GIB).enforce()
    assert allocator.fraction == 1.0


def test_what_is_there_already_is_told(allocator: Allocator) -> None:
    allocator.reserved = 21 * GIB
    with pytest.raises(
        BudgetError, match=r"PyTorch has reserved 22,548,578,304 bytes on cuda:0 already"
    ) as caught:
        device(20 * GIB).enforce()
    assert caught.value.smallest == 21 * GIB
    assert allocator.fraction == 1.0


class Full:
    """Memory of a chunk that the allocator does not give."""

    nbytes = 4096

    def untyped_storage(self) -> Full:
        return self

    def resize_(self, size: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 KiB")


def test_a_chunk_that_finds_no_room_is_told_as_on_the_simulated_device(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes that are in use, and what can be done; the chunk does not count as loaded."""
    made = device(20 * GIB)
    with pytest.raises(
        DeviceFull, match=r"a chunk of parameters: 4,096 bytes do not fit, 3,000 of .* in use"
    ):
        made.fill(Full(), torch.zeros(1024))  # type: ignore[arg-type]
    assert made.used == 0

    simulated = SimulatedDevice(1 << 20)
    chunks = build_chunks(torch.nn.Linear(8, 8))
    store = ChunkStore(chunks, simulated, Tier())
    monkeypatch.setattr(simulated, "fill", lambda buffer, source: made.fill(Full(), source))  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match=r"at least 7,096 bytes; shorter inputs, a smaller batch"):
        store.load(0)
    assert store.resident == frozenset()


def test_a_manager_undoes_the_limit_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks for it where it is told to, alone."""
    told: list[str] = []

    def enforce(_: SimulatedDevice) -> Any:
        told.append("enforced")
        return lambda: told.append("undone")

    monkeypatch.setattr(SimulatedDevice, "enforce", enforce)
    Gemini(torch.nn.Linear(8, 8), config=GeminiConfig(budget=1 << 20)).release()
    assert told == []
    manager = Gemini(torch.nn.Linear(8, 8), config=GeminiConfig(budget=1 << 20, hard_budget=True))
    assert told == ["enforced"]
    manager.release()
    assert told == ["enforced", "undone"]
