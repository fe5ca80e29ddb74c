"""Choose the block sizes of large operators from a memory budget and the cost of each size.

Operators that run one after the other share a budget, not memory. Each takes the fastest of its candidates that fits
in addition to the resident memory. The time of a candidate is measured (:func:`measure_blocks`): the operator's work,
and an overhead for each block.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastfold.memory.planner.planner import BudgetError

_MAX_LENGTH = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """One way to run an operator."""

    size: int  #: Block size, in the operator's own unit
    working: int  #: Bytes used in addition to the resident memory
    seconds: float  #: Time of the operator
    host: int = 0  #: Bytes of the host's memory, if the operator offloads
    disk: int = 0  #: Bytes on a disk, if the operator offloads to one
    #: Other settings of the operator, by its own names
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockedOperator:
    """Operator that can run in several ways."""

    name: str
    resident: int  #: Bytes held while it runs, with any of its candidates
    candidates: tuple[Candidate, ...]  #: At least one
    unit: str = "rows"  #: Unit of block sizes

    @property
    def smallest(self) -> int:
        """Smallest number of bytes with which the operator can run."""
        return self.resident + min(c.working for c in self.candidates)


@dataclass(frozen=True)
class BlockPlan:
    """Chosen candidate of each operator."""

    operators: tuple[BlockedOperator, ...]
    chosen: Mapping[str, Candidate]
    budget: int

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return max(o.resident + self.chosen[o.name].working for o in self.operators)

    @property
    def host(self) -> int:
        """Peak of the host's memory in bytes."""
        return max(c.host for c in self.chosen.values())

    @property
    def disk(self) -> int:
        """Peak of disk usage in bytes."""
        return max(c.disk for c in self.chosen.values())

    @property
    def seconds(self) -> float:
        """Time in seconds to run every operator once."""
        return sum(c.seconds for c in self.chosen.values())

    @property
    def slow_down(self) -> float:
        """Time relative to the fastest candidates without a budget; at least 1."""
        fastest = sum(min(c.seconds for c in o.candidates) for o in self.operators)
        return self.seconds / fastest if fastest else 1.0


def choose_candidates(
    operators: Sequence[BlockedOperator], budget: int, *, host_budget: int | None = None
) -> BlockPlan:
    """Choose the fastest candidate of each operator that fits the budget of the device, and of these the smallest.

    Budgets are in bytes. Operators have distinct names. Those that offload share the bytes ``host_budget`` of the
    host's memory, if limited.

    Raises:
        BudgetError: No candidate of an operator fits. Names the operator and the smallest budget that works.
    """
    chosen = {}
    for operator in operators:
        room = budget - operator.resident
        candidates = [c for c in operator.candidates if host_budget is None or c.host <= host_budget]
        if not candidates:
            least = min(c.host for c in operator.candidates)
            raise BudgetError(f"{operator.name} needs {least:,} bytes of the host's memory", budget)
        fitting = [c for c in candidates if c.working <= room]
        if not fitting:
            smallest = smallest_that_works(operators, host_budget=host_budget)
            raise BudgetError(
                f"a budget of {budget:,} bytes is too small: {operator.name} needs "
                f"{operator.resident + min(c.working for c in candidates):,} bytes at once; the smallest budget that "
                f"works is {smallest:,} bytes",
                smallest,
            )
        chosen[operator.name] = min(fitting, key=lambda c: (c.seconds, c.working, c.host, c.disk))
    return BlockPlan(tuple(operators), chosen, budget)


def smallest_that_works(operators: Sequence[BlockedOperator], *, host_budget: int | None = None) -> int:
    """Return the smallest budget in bytes for which :func:`choose_candidates` finds a plan."""
    return max(
        operator.resident
        + min(c.working for c in operator.candidates if host_budget is None or c.host <= host_budget)
        for operator in operators
    )


def longest_that_fits(smallest: Callable[[int], int], budget: int, *, most: int = _MAX_LENGTH) -> int:
    """Return the largest length whose smallest budget is within a budget.

    ``smallest`` returns the smallest budget in bytes of a length, and must not decrease with it.
    """
    return bisect.bisect_right(range(1, most + 1), budget, key=smallest)


@dataclass(frozen=True)
class BlockCost:
    """Cost of blocks, a line fitted to measurements."""

    work: float  #: Seconds of the operator itself, for any number of blocks
    per_block: float  #: Seconds for each block

    def seconds(self, blocks: float) -> float:
        """Return the seconds for a number of blocks."""
        return self.work + self.per_block * blocks


def fit_blocks(measured: Mapping[int, float]) -> BlockCost:
    """Fit seconds by number of blocks: a line of least relative squares with nonnegative parts."""
    if len(measured) < 2:
        raise ValueError("expected measurements of at least two numbers of blocks")
    weights = {blocks: 1.0 / max(seconds, 1e-12) ** 2 for blocks, seconds in measured.items()}
    total = sum(weights.values())
    mean_x = sum(w * b for b, w in weights.items()) / total
    mean_y = sum(weights[b] * s for b, s in measured.items()) / total
    spread = sum(w * (b - mean_x) ** 2 for b, w in weights.items())
    slope = sum(weights[b] * (b - mean_x) * (s - mean_y) for b, s in measured.items()) / spread
    slope = max(0.0, slope)
    return BlockCost(max(0.0, mean_y - slope * mean_x), slope)


def measure_blocks(
    run: Callable[[int], object],
    blocks: Sequence[int],
    *,
    repeats: int = 3,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> BlockCost:
    """Time an operator with at least two distinct numbers of blocks.

    Each number runs ``repeats`` times, in turns. The fastest counts, because other processes only add time.
    ``synchronize`` waits until the device has finished its work, and ``clock`` returns seconds.
    """
    best = dict.fromkeys(blocks, float("inf"))
    run(blocks[0])
    synchronize()
    for _ in range(repeats):
        for count in best:
            start = clock()
            run(count)
            synchronize()
            best[count] = min(best[count], clock() - start)
    return fit_blocks(best)
