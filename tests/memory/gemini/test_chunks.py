"""Chunks: every parameter in one place, little waste, and no illegal change of state."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastfold.memory.gemini.chunks import (
    Chunk,
    ChunkState,
    IllegalTransition,
    Slot,
    build_chunks,
    search_chunk_size,
    waste,
)


class Odd(nn.Module):
    """Shared, frozen, unused, odd-sized and mixed-precision parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(7, 5)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.half = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.unused = nn.Linear(100, 3)


def test_every_parameter_is_in_exactly_one_chunk():
    """Shared ones once; views do not overlap and begin on aligned addresses."""
    model = Odd()
    chunks = build_chunks(model)
    slots = [slot for chunk in chunks for slot in chunk.slots]
    assert sorted(s.name for s in slots) == sorted(n for n, _ in model.named_parameters())
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        ends = sorted((s.offset, s.offset + s.shape.numel()) for s in chunk.slots)
        assert ends[-1][1] <= chunk.numel
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
        assert all(s.offset * chunk.dtype.itemsize % 64 == 0 for s in chunk.slots)


def test_frozen_parameters_and_parents_have_chunks_of_their_own():
    """No chunk mixes frozen with trainable, types, or a parent's own parameters with its children's."""
    model = Odd()
    for chunk in build_chunks(model):
        assert len({(s.parameter.requires_grad, s.parameter.dtype) for s in chunk.slots}) == 1
        assert len({s.name == "scale" for s in chunk.slots}) == 1


def test_a_modules_parameters_stay_together():
    """One operator, one chunk."""
    model = nn.Sequential(*(nn.Linear(3, i + 1) for i in range(9)))
    chunk_of = {s.name: c.index for c in build_chunks(model) for s in c.slots}
    assert all(chunk_of[f"{i}.weight"] == chunk_of[f"{i}.bias"] for i in range(9))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_no_chunk_size_in_the_range_wastes_less(units, largest):
    """The search is as good as trying all sizes."""
    size = search_chunk_size(units, largest)
    allowed = range(max(units), max(largest, max(units)) + 1)
    assert size in allowed
    assert waste(units, size) == min(waste(units, s) for s in allowed)


LEGAL = {
    "FREE HOLD",
    "HOLD FREE",
    "HOLD COMPUTE",
    "COMPUTE HOLD",
    "COMPUTE HOLD_AFTER_BACKWARD",
    "HOLD_AFTER_BACKWARD FREE",
    "HOLD_AFTER_BACKWARD HOLD",
    "HOLD_AFTER_BACKWARD COMPUTE",
    "HOLD_AFTER_BACKWARD READY_FOR_REDUCE",
    "READY_FOR_REDUCE FREE",
    "READY_FOR_REDUCE COMPUTE",
    "READY_FOR_REDUCE HOLD",
}


@pytest.mark.parametrize(("before", "after"), list(product(ChunkState, ChunkState)))
def test_illegal_transitions_raise(before, after):
    """Computing on what is not there, and freeing what is in use, are errors; the state stays."""
    chunk = Chunk(0, [Slot("p", nn.Parameter(torch.zeros(4)), 0)], 16)
    chunk.state = before
    if f"{before.name} {after.name}" in LEGAL:
        chunk.become(after)
        assert chunk.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"from {before.name} to {after.name}"):
            chunk.become(after)
        assert chunk.state is before
