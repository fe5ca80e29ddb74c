"""Sizes of the blocks in which big operators run, from a budget and what each size costs.

Operators that run one after the other share a budget without sharing memory: each takes the fastest of its candidates
that fits in addition to what is resident at that time. How long a candidate takes is measured
(:func:`measure_blocks`), not guessed: an operator's time is that of its work and, for every block, an overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastfold.memory.planner.planner import BudgetError

_MAX_LENGTH = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """One way to run an operator.

    Attributes:
        size: Of its blocks, in the operator's own unit.
        working: Bytes that it takes in addition to what is resident.
        seconds: What it costs.
        host: Bytes that it takes of the host's memory, if the operator runs elsewhere.
        disk: Bytes that it takes of a disk, as memory that is slower still.
        settings: What else has to be told to the operator, by whatever name it has there.
    """

    size: int
    working: int
    seconds: float
    host: int = 0
    disk: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    """Something that can be run in several ways.

    Attributes:
        name: What people call it.
        resident: Bytes that are there while it runs, whichever way that is.
        candidates: At least one.
        unit: What sizes count.
    """

    name: str
    resident: int
    candidates: tuple[Candidate, ...]
    unit: str = "rows"

    @property
    def smallest(self) -> int:
        """Bytes without which it cannot run."""
        return self.resident + min(c.working for c in self.candidates)


@dataclass(frozen=True)
class BlockPlan:
    """How each operator is run.

    Attributes:
        operators: What was planned.
        chosen: The candidate of each, by its name.
        budget: Bytes that there are.
    """

    operators: tuple[Operator, ...]
    chosen: Mapping[str, Candidate]
    budget: int

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return max(o.resident + self.chosen[o.name].working for o in self.operators)

    @property
    def host(self) -> int:
        """Most bytes of the host's memory at any time."""
        return max(c.host for c in self.chosen.values())

    @property
    def disk(self) -> int:
        """Most bytes of the disk at any time."""
        return max(c.disk for c in self.chosen.values())

    @property
    def seconds(self) -> float:
        """Time of everything once."""
        return sum(c.seconds for c in self.chosen.values())

    @property
    def slow_down(self) -> float:
        """Time over that of the fastest candidates, whatever memory they take: 1 where the budget costs nothing."""
        fastest = sum(min(c.seconds for c in o.candidates) for o in self.operators)
        return self.seconds / fastest if fastest else 1.0


def choose_candidates(
    operators: Sequence[Operator], budget: int, *, host_budget: int | None = None
) -> BlockPlan:
    """The fastest candidate of each operator that fits; of equally fast ones the one that takes the least.

    Args:
        operators: With different names.
        budget: Bytes that there are.
        host_budget: Bytes of the host's memory for operators that run elsewhere; None for any.

    Raises:
        BudgetError: No candidate of an operator fits; says which operator, and the smallest budget that works.
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


def smallest_that_works(operators: Sequence[Operator], *, host_budget: int | None = None) -> int:
    """The smallest budget with which :func:`choose_candidates` finds a plan, in bytes."""
    return max(
        operator.resident
        + min(c.working for c in operator.candidates if host_budget is None or c.host <= host_budget)
        for operator in operators
    )


def longest_that_fits(smallest: Callable[[int], int], budget: int, *, most: int = _MAX_LENGTH) -> int:
    """The largest length whose smallest budget is no more than a budget.

    Args:
        smallest: Smallest budget of a length; must not fall with it.
        budget: Bytes.
        most: No longer than this.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if smallest(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class BlockCost:
    """What blocks cost: a line through measurements.

    Attributes:
        work: Seconds of the operator, however it is cut.
        per_block: Seconds that each block adds.
    """

    work: float
    per_block: float

    def seconds(self, blocks: float) -> float:
        """Seconds with this number of blocks."""
        return self.work + self.per_block * blocks


def fit_blocks(measured: Mapping[int, float]) -> BlockCost:
    """The line of least relative squares through seconds by number of blocks; neither part is below zero."""
    if len(measured) < 2:
        raise ValueError("a line needs measurements of two numbers of blocks")
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
    """Time an operator with several numbers of blocks.

    Args:
        run: Runs it with a number of blocks.
        blocks: The numbers, at least two different ones.
        repeats: Runs of each, in turns, of which the fastest counts: what else the machine does only adds time.
        synchronize: Waits until the device has done its work.
        clock: Seconds.
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
