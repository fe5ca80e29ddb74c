"""Plan of each chunk's residency for an endlessly repeated schedule.

:func:`plan` is deterministic, so ranks with equal traces make equal decisions. It simulates farthest next use until the
decisions repeat, and takes the residency intervals from the repeated cycles. If chunks differ in size, exchanges
improve them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from fastfold.memory.planner.interval_packing import IntervalPacking, ResidencyInterval, residency_intervals
from fastfold.memory.planner.schedule import (
    Access,
    AccessStep,
    BudgetError,
    Chunk,
    NextUse,
    Plan,
    Span,
    choose_evictions,
    smallest_budget,
)

K = TypeVar("K")

# Cycles simulated in search of a repetition; more improve little (see `_period`).
_CYCLES = 24
_ACCESSES = 200_000
# If chunks differ in size, farthest next use may miss the best period. Short schedules are tried over this many cycles,
# and at most this many accesses.
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
    """Plan the chunks on the device at each access of an endlessly repeated schedule.

    Args:
        trace: One cycle.
        sizes: Size of each chunk in bytes.
        budget: Bytes on the device.
        volatile: Chunks whose device copy is invalid at the end of a cycle.
        resident: Chunks on the device before the first cycle.
        lookahead: Largest number of accesses by which a load may precede its use.

    Returns:
        The plan. ``plan.peak`` is at most ``budget``, and every access finds its chunks on the device.

    Raises:
        BudgetError: One access needs more than the budget. Names the smallest budget that works.

    Example:
        >>> from fastfold.memory import Access, plan
        >>> forward = [Access(frozenset({layer}), other=10) for layer in range(4)]
        >>> trace, sizes = forward + forward[::-1], dict.fromkeys(range(4), 10)
        >>> [plan(trace, sizes, budget).loads for budget in (20, 30, 40, 50)]
        [6.0, 4.0, 2.0, 0.0]
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
    # The first period starts from the resident chunks; later periods start from the end of the previous one.
    cycles: list[tuple[AccessStep, ...]] = []
    count = max(1, len(staying) // max(1, len(trace)))
    while len(cycles) < 2 * count:
        first = len(cycles) % count * len(trace)
        steps = _simulate(trace, resident, partial(_idle, staying[first : first + len(trace)]))
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
    """Choose the spans that stay on the device, in competition with the chunks, by their indices.

    Spans are packed like chunks between two uses: short intervals come first, and exchanges improve the result. Between
    forward and backward pass this keeps the last layers' saved tensors and parameters. The trace is one cycle, measured
    with all spans offloaded; none stays if the budget cannot hold it. For ``volatile`` see :func:`plan`.

    Example:
        >>> from fastfold.memory import Access, Span, choose_spans
        >>> trace, sizes = [Access(frozenset({layer})) for layer in (0, 1, 1, 0)], {0: 20, 1: 20}
        >>> saved = [Span(size=30, first=0, last=3), Span(size=10, first=1, last=2)]
        >>> [sorted(choose_spans(trace, sizes, budget, saved)) for budget in (20, 30, 80)]
        [[], [1], [0, 1]]
    """
    if smallest_budget(trace, sizes) > budget:
        return frozenset()
    room = _room(trace, sizes, budget)
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
    """Return the trace including the spans that stay.

    Example:
        >>> from fastfold.memory import Access, Span, smallest_budget, with_spans
        >>> trace, sizes = [Access(frozenset({layer})) for layer in (0, 1, 0)], {0: 20, 1: 30}
        >>> saved = [Span(size=5, first=0, last=2)]
        >>> smallest_budget(trace, sizes), smallest_budget(with_spans(trace, saved), sizes)
        (30, 35)
    """
    others = [access.other for access in trace]
    for span in spans:
        for position in range(span.first, span.last + 1):
            others[position] += span.size
    return tuple(Access(access.chunks, other) for access, other in zip(trace, others, strict=True))


def _room(trace: Sequence[Access], sizes: Mapping[Chunk, int], budget: int) -> list[int]:
    return [budget - smallest_budget([access], sizes) for access in trace]


def _idle(staying: Sequence[frozenset[Chunk]], position: int, here: frozenset[Chunk]) -> frozenset[Chunk]:
    return here - staying[position]


def _simulate(
    trace: Sequence[Access],
    resident: frozenset[Chunk],
    evicted: Callable[[int, frozenset[Chunk]], Iterable[Chunk]],
) -> tuple[AccessStep, ...]:
    """Simulate one cycle: before each access, chosen chunks are evicted and missing ones loaded."""
    steps = []
    for position, access in enumerate(trace):
        evict = tuple(sorted(set(evicted(position, resident)) - access.chunks))
        load = tuple(sorted(access.chunks - resident))
        resident = (resident - set(evict)) | access.chunks
        steps.append(AccessStep(evict, load, (), resident))
    return tuple(steps)


def _pack(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    volatile: frozenset[Chunk],
    resident: frozenset[Chunk],
) -> IntervalPacking:
    """Return the best packing of intervals found, over the cycles until a repetition."""
    uses = [access.chunks for access in trace]
    room = _room(trace, sizes, budget)
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


def _farthest_next_use(
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    volatile: frozenset[Chunk],
    resident: frozenset[Chunk],
) -> Sequence[tuple[AccessStep, ...]]:
    """Return the cycles that farthest next use repeats."""
    next_use = NextUse(trace, volatile)

    def evicted(position: int, here: frozenset[Chunk]) -> tuple[Chunk, ...]:
        access = trace[position]
        return choose_evictions(here, access.chunks, budget - access.other, sizes, next_use, position)

    limit = max(2, min(_CYCLES, _ACCESSES // max(1, len(trace))))
    cycles: list[tuple[AccessStep, ...]] = []
    starts = [resident]
    while len(cycles) < limit and (len(starts) < 3 or starts[-1] not in starts[1:-1]):
        steps = _simulate(trace, starts[-1], evicted)
        cycles.append(steps)
        starts.append((steps[-1].resident if steps else starts[-1]) - volatile)
    start, end = _period(cycles, starts, sizes)
    return cycles[start:end]


def _period(
    cycles: Sequence[tuple[AccessStep, ...]], starts: Sequence[frozenset[Chunk]], sizes: Mapping[Chunk, int]
) -> tuple[int, int]:
    """Return the cycles ``[i, j)`` that are cheapest to repeat, including the change from end to start."""
    costs = [sum(sizes[c] for step in cycle for c in step.load) for cycle in cycles]

    def mean(i: int, j: int) -> float:
        exchange = sum(sizes[c] for c in starts[i] - starts[j])
        return (sum(costs[i:j]) + exchange) / (j - i)

    candidates = [(i, j) for j in range(1, len(cycles) + 1) for i in range(j) if i > 0 or len(cycles) == 1]
    return min(candidates, key=lambda ij: (mean(*ij), ij[1] - ij[0], ij[1]), default=(0, 0))


def start_early(
    cycle: tuple[AccessStep, ...],
    trace: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
    lookahead: int,
) -> tuple[AccessStep, ...]:
    """Start loads earlier, together with the evictions that free their memory."""
    evict = [list(step.evict) for step in cycle]
    load = [list(step.load) for step in cycle]
    prefetch: list[list[Chunk]] = [[] for _ in cycle]
    resident = [set(step.resident) for step in cycle]
    free = [budget - a.other - sum(map(sizes.__getitem__, r)) for a, r in zip(trace, resident, strict=True)]
    for position in range(1, len(cycle)):
        for chunk in list(load[position]):
            issue, made = position, list(evict[position])
            for earlier in range(position - 1, max(-1, position - 1 - lookahead), -1):
                # An evicted chunk must not be used between `earlier` and `position`.
                made = [c for c in made if c in resident[earlier] and c not in trace[earlier].chunks]
                gained, leaving = 0, []
                for c in made:
                    if free[earlier] + gained >= sizes[chunk]:
                        break
                    gained += sizes[c]
                    leaving.append(c)
                if (
                    chunk in resident[earlier]
                    or chunk in evict[earlier]
                    or free[earlier] + gained < sizes[chunk]
                ):
                    break
                for c in leaving:
                    for where in range(earlier + 1, position + 1):
                        if c in evict[where]:
                            evict[where].remove(c)
                    for where in range(earlier, position):
                        if c in resident[where]:
                            resident[where].discard(c)
                            free[where] += sizes[c]
                    evict[earlier].append(c)
                resident[earlier].add(chunk)
                free[earlier] -= sizes[chunk]
                issue = earlier
            if issue < position:
                load[position].remove(chunk)
                prefetch[issue].append(chunk)
    return tuple(
        AccessStep(tuple(e), tuple(w), tuple(p), frozenset(r))
        for e, w, p, r in zip(evict, load, prefetch, resident, strict=True)
    )


def early_returns(
    cycle: Sequence[AccessStep],
    trace: Sequence[Access],
    spans: Mapping[K, Span],
    sizes: Mapping[Chunk, int],
    budget: int,
    lookahead: int,
) -> dict[int, list[K]]:
    """Choose the accesses at which offloaded tensors begin to return before their use.

    ``spans`` has the accesses between which they are away; the trace includes them at their uses. A return precedes its
    use by at most ``lookahead`` accesses.

    Returns:
        Tensors to return per access, in the order of their uses. No access exceeds the budget, even if a tensor counts
        twice at its use, because an operator may need its largest memory before it reads saved tensors.
    """
    free = [
        budget - access.other - sum(map(sizes.__getitem__, step.resident))
        for access, step in zip(trace, cycle, strict=True)
    ]
    starts: dict[int, list[K]] = {}
    for key, span in sorted(spans.items(), key=lambda item: item[1].last):
        start = span.last
        if free[start] < span.size:
            continue
        while start - 1 > max(span.first, span.last - 1 - lookahead) and free[start - 1] >= span.size:
            start -= 1
        if start < span.last:
            starts.setdefault(start, []).append(key)
            for position in range(start, span.last + 1):
                free[position] -= span.size
    return starts
