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
    """Twice the ranks hold half each, but for masks and, in a fold, what is under way in blocks of channels."""
    held = {ranks: getattr(_memory(ranks), what) for ranks in (1, 2, 4, 8)}
    print({ranks: f"{x:.2f} U, together {x * ranks:.2f} U" for ranks, x in held.items()})
    half = 0.55 if what == "folding" else 0.52
    assert held[4] < half * held[2]
    assert held[8] < half * held[4]
    # Of a triangle multiplication one process keeps the input alone, ranks what took messages too.
    assert held[2] < (0.75 if what == "block" else 0.55) * held[1]
