"""What a model takes at least, compared with what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fastfold.memory import BudgetError, NvmeTier, SimulatedDevice
from fastfold.memory.devices.disk_file import PAGE
from fastfold.memory.gemini import checks
from fastfold.memory.gemini.checks import check_budget, check_host, kept_bytes
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import Chunk, build_chunks


def _model() -> tuple[nn.Module, list[Chunk]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    return model, build_chunks(model, largest=1)


def test_what_is_kept_is_counted_and_fits_into_a_file_of_pages(tmp_path: Path) -> None:
    """Parameters of all, gradients and both moments of what trains; the last state finds its room."""
    model, chunks = _model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    sizes = [chunk.nbytes for chunk in chunks]
    trained = sum(chunk.nbytes for chunk in chunks if chunk.trainable)
    assert kept_bytes(chunks, chunks, optimizer) == sum(sizes) + 3 * trained
    assert kept_bytes(chunks[:1], chunks, optimizer) == sum(sizes) + trained + 2 * sizes[0]
    assert kept_bytes(chunks, chunks, None) == sum(sizes) + trained
    tier = NvmeTier(tmp_path)
    tier.preallocate(kept_bytes(chunks, chunks, optimizer, multiple=PAGE))
    store = ChunkStore(chunks, SimulatedDevice(1 << 20), tier)
    for chunk in chunks:
        if chunk.trainable:
            store.gradient(chunk)
    store.prepare_states(chunks, optimizer)
    assert tier._file is not None
    assert len(tier._places) == len(chunks) + 3 * sum(chunk.trainable for chunk in chunks)
    assert tier._file.used <= tier._file.size <= tier._file.used + 2 * PAGE * len(chunks)


def test_budgets_that_cannot_work_name_the_smallest_that_does() -> None:
    model, chunks = _model()
    device, optimizer = SimulatedDevice(1 << 20), torch.optim.SGD(model.parameters())
    largest, total = max(chunk.nbytes for chunk in chunks), sum(chunk.nbytes for chunk in chunks)
    trained = sum(chunk.nbytes for chunk in chunks if chunk.trainable)
    for policy, smallest in (("auto", largest), ("cuda", total + trained)):
        check_budget(chunks, device, smallest, policy, optimizer)
        with pytest.raises(BudgetError) as caught:
            check_budget(chunks, device, smallest - 1, policy, optimizer)
        assert caught.value.smallest == smallest


def test_parameters_that_are_on_the_host_already_need_no_room_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, chunks = _model()
    here = sum(slot.parameter.nbytes for chunk in chunks for slot in chunk.slots)
    monkeypatch.setattr(checks, "host_available_bytes", lambda: 100)
    check_host(here + 100, chunks)
    with pytest.raises(BudgetError, match="take 101 more bytes of the host's memory; 100 are available"):
        check_host(here + 101, chunks)
