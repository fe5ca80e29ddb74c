"""What a rank holds of a whole network, embedding to heads, falls as the ranks grow."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.rank_memory import RankMemory, rank_memory
from fastfold.parallel.plan import ParallelPlan


@cache
def _memory(ranks: int) -> RankMemory:
    return rank_memory(ParallelPlan(dap=ranks), residues=256, msa=128, extra_msa=256)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["folding", "block", "checkpoint"])
def test_memory_of_a_rank_falls_as_one_over_the_ranks(what: str) -> None:
    """Twice the ranks hold little more than half each; only biases, masks and one projection are whole everywhere."""
    held = {ranks: getattr(_memory(ranks), what) for ranks in (1, 2, 4, 8)}
    print({ranks: f"{x:.2f} U, together {x * ranks:.2f} U" for ranks, x in held.items()})
    # What is whole everywhere becomes the larger part with more ranks.
    assert held[4] < 0.56 * held[2]
    assert held[8] < 0.58 * held[4]
    if what == "folding":
        assert held[2] < 0.56 * held[1]
    # Operators of one process keep less than their sharded forms, but for the inputs of blocks.
    assert held[8] < (0.15 if what == "checkpoint" else 0.32) * held[1]
