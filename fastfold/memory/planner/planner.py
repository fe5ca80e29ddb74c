"""When each chunk is on the device, for an endlessly repeated schedule.

:func:`plan` is pure: equal arguments give equal plans, so ranks that agree on the trace agree on every decision. It
follows farthest next use until that repeats itself, takes what stays on the device between two uses from there, and
improves it by exchanges where chunks differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastfold.memory.planner.early import start_early
from fastfold.memory.planner.interval_packing import IntervalPacking, ResidencyInterval, residency_intervals
from fastfold.memory.planner.schedule import (
    Access,
    BudgetError,
    Chunk,
    NextUse,
    Plan,
    Span,
    Step,
    choose_evictions,
    smallest_budget,
)

# Cycles that are followed in search of a repetition; more would find little (see `_period`).
_CYCLES = 24
_ACCESSES = 200_000
# Where chunks differ in size, farthest next use need not find the best period: short schedules are tried over this
# many cycles, and over no more accesses than these.
_PERIODS = 4
_SHORT = 200


def plan(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    *,
    volatile: frozenset[Chunk] = frozenset(),
    resident: frozenset[Chunk] = frozenset(),
    lookahead: int = 2,
) -> Plan:
    """Decides what is on the device at each access of an endlessly repeated schedule.

    Args:
        trace: One cycle.
        sizes: Bytes of each chunk.
        budget: Bytes on the device.
        volatile: Chunks whose device copy is worthless at the end of a cycle.
        resident: On the device before the first cycle.
        lookahead: How many accesses before its use a load may start.

    Returns:
        The plan. ``plan.peak`` is at most ``budget``; every access finds its chunks resident.

    Raises:
        BudgetError: One access alone needs more than the budget; names the smallest that works.
    """
    smallest = smallest_budget(trace, sizes)
    if smallest > budget:
        worst = max(range(len(trace)), key=lambda i: smallest_budget(trace[i : i + 1], sizes))
        raise BudgetError(
            f"a budget of {budget:,} bytes is too small: operator {worst} of {len(trace)} needs {smallest:,} bytes "
            f"at once ({trace[worst].other:,} of them activations); the smallest budget that works is {smallest:,} "
            "bytes",
            smallest,
        )
    packing = _pack(trace, sizes, budget, volatile, resident)
    staying = packing.resident()
    # The first period begins with what is there, and loads what later ones find.
    cycles: list[tuple[Step, ...]] = []
    count = max(1, len(staying) // max(1, len(trace)))
    while len(cycles) < 2 * count:
        first = len(cycles) % count * len(trace)
        steps = _follow(trace, staying[first : first + len(trace)], resident)
        cycles.append(steps)
        resident = (steps[-1].resident if steps else resident) - volatile
    planned = [start_early(cycle, trace, sizes, budget, lookahead) for cycle in cycles]
    return Plan(tuple(planned), count, budget, dict(sizes), tuple(a.other for a in trace))


def choose_spans(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    spans: Sequence[Span],
    *,
    volatile: frozenset[Chunk] = frozenset(),
) -> frozenset[int]:
    """Decides which spans stay on the device, in competition with the chunks for the same room.

    A span and a chunk between two uses are alike: what stays for the shortest time comes first, and exchanges improve
    on that. Between forward and backward pass this keeps the last layers' saved tensors and parameters.

    Args:
        trace: One cycle, measured with all spans away.
        sizes: Bytes of each chunk.
        budget: Bytes on the device.
        spans: What may stay.
        volatile: Chunks whose device copy is worthless at the end of a cycle.

    Returns:
        Indices of the spans that stay. None where the budget does not even hold the trace without them.
    """
    if smallest_budget(trace, sizes) > budget:
        return frozenset()
    room = [budget - access.other - sum(map(sizes.__getitem__, access.chunks)) for access in trace]
    intervals = residency_intervals([access.chunks for access in trace], sizes, 1, volatile)
    first = len(intervals)
    intervals += [
        ResidencyInterval(-1 - i, span.first, span.last - span.first + 1, span.size)
        for i, span in enumerate(spans)
    ]
    packing = IntervalPacking(room, intervals, ())
    packing.improve()
    return frozenset(index - first for index in packing.kept if index >= first)


def with_spans(trace: Sequence[Access], spans: Sequence[Span]) -> tuple[Access, ...]:
    """The trace with what these spans take while they stay."""
    others = [access.other for access in trace]
    for span in spans:
        for position in range(span.first, span.last + 1):
            others[position] += span.size
    return tuple(Access(access.chunks, other) for access, other in zip(trace, others, strict=True))


def _pack(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    volatile: frozenset[Chunk],
    resident: frozenset[Chunk],
) -> IntervalPacking:
    """The best packing of intervals that was found, over as many cycles as it takes to repeat."""
    uses = [access.chunks for access in trace]
    room = [budget - access.other - sum(map(sizes.__getitem__, access.chunks)) for access in trace]
    repeating = _farthest_next_use(trace, sizes, budget, volatile, resident)
    intervals = residency_intervals(uses, sizes, len(repeating), volatile)
    here = [step.resident for cycle in repeating for step in cycle]
    kept = [
        index
        for index, interval in enumerate(intervals)
        if all(interval.chunk in here[(interval.start + i) % len(here)] for i in range(interval.length))
    ]
    best = IntervalPacking(room * len(repeating), intervals, kept)
    if len({interval.size for interval in intervals}) < 2:
        best.fill(range(len(intervals)))
        return best
    best.improve()
    cycles = len(repeating)
    for count in range(1, 1 + min(_PERIODS, _SHORT // len(trace))):
        other = IntervalPacking(room * count, residency_intervals(uses, sizes, count, volatile), ())
        other.improve()
        if other.saved * cycles > best.saved * count:
            best, cycles = other, count
    return best


def _follow(
    trace: Sequence[Access], staying: Sequence[frozenset[Chunk]], resident: frozenset[Chunk]
) -> tuple[Step, ...]:
    """One cycle in which only what is to stay stays."""
    steps = []
    for access, stay in zip(trace, staying, strict=True):
        evict = tuple(sorted(resident - access.chunks - stay))
        load = tuple(sorted(access.chunks - resident))
        resident = (resident - set(evict)) | access.chunks
        steps.append(Step(evict, load, (), resident))
    return tuple(steps)


def _farthest_next_use(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    volatile: frozenset[Chunk],
    resident: frozenset[Chunk],
) -> Sequence[tuple[Step, ...]]:
    """The cycles that farthest next use repeats in the end."""
    next_use = NextUse(trace, volatile)
    limit = max(2, min(_CYCLES, _ACCESSES // max(1, len(trace))))
    cycles: list[tuple[Step, ...]] = []
    starts = [resident]
    while len(cycles) < limit and (len(starts) < 3 or starts[-1] not in starts[1:-1]):
        steps = _cycle(trace, sizes, budget, next_use, starts[-1])
        cycles.append(steps)
        starts.append((steps[-1].resident if steps else starts[-1]) - volatile)
    start, end = _period(cycles, starts, sizes)
    return cycles[start:end]


def _cycle(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    next_use: NextUse,
    resident: frozenset[Chunk],
) -> tuple[Step, ...]:
    """One cycle from a given start: loads when they are needed, evictions when there is no room."""
    steps = []
    for position, access in enumerate(trace):
        evict = choose_evictions(resident, access.chunks, budget - access.other, sizes, next_use, position)
        load = tuple(sorted(access.chunks - resident))
        resident = (resident - set(evict)) | access.chunks
        steps.append(Step(evict, load, (), resident))
    return tuple(steps)


def _period(
    cycles: Sequence[tuple[Step, ...]], starts: Sequence[frozenset[Chunk]], sizes: Mapping[Chunk, int]
) -> tuple[int, int]:
    """The run of cycles ``[i, j)`` that is cheapest to repeat, counting the exchange from the end to the start."""
    costs = [sum(sizes[c] for step in cycle for c in step.load) for cycle in cycles]

    def mean(i: int, j: int) -> float:
        exchange = sum(sizes[c] for c in starts[i] - starts[j])
        return (sum(costs[i:j]) + exchange) / (j - i)

    candidates = [(i, j) for j in range(1, len(cycles) + 1) for i in range(j) if i > 0 or len(cycles) == 1]
    return min(candidates, key=lambda ij: (mean(*ij), ij[1] - ij[0], ij[1]), default=(0, 0))
