"""When each chunk is on the device: eviction by farthest next use over a cyclic schedule.

A schedule repeats: every training step and every recycle touches the chunks in the order of the last one. So the next
use of each chunk is known, and what is needed farthest in the future is evicted first (Belady, IBM Systems Journal 5,
1966), with the schedule's beginning following its end. For chunks of one size no other order loads less.

:func:`plan` is pure: equal arguments give equal plans, so ranks that agree on the trace agree on every decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fastfold.errors import ConfigError

Chunk = int
_NEVER = 1 << 60
# Cycles that are followed in search of a repetition; more would find little (see `_period`).
_CYCLES = 24
_ACCESSES = 200_000


class BudgetError(ConfigError):
    """A budget that cannot hold what one operator needs.

    Args:
        message: What does not fit and what would.
        smallest: The smallest budget that works, in bytes, as far as it is known.
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class Access:
    """One operator's turn.

    Args:
        chunks: What must be on the device while it runs.
        other: Bytes of everything else on the device at that time (activations, workspaces).
    """

    chunks: frozenset[Chunk]
    other: int = 0


@dataclass(frozen=True)
class Step:
    """What happens at one access, in this order.

    Args:
        evict: Leave the device before the operator runs.
        load: Come to the device before the operator runs.
        prefetch: Start to come while the operator runs; needed by a later one.
        resident: On the device, or on the way to it, while the operator runs.
    """

    evict: tuple[Chunk, ...]
    load: tuple[Chunk, ...]
    prefetch: tuple[Chunk, ...]
    resident: frozenset[Chunk]


@dataclass(frozen=True)
class Plan:
    """Residency for every access of an endless repetition of one schedule.

    Cycle ``i`` is ``cycles[i]`` up to the end of the list, and then ``cycles[start:]`` again and again.

    Args:
        cycles: Per cycle, one :class:`Step` per access.
        start: Where the repeating part begins.
        budget: Bytes that it was made for.
        sizes: Bytes of each chunk.
        others: Bytes of everything else at each access.
    """

    cycles: tuple[tuple[Step, ...], ...]
    start: int
    budget: int
    sizes: Mapping[Chunk, int]
    others: tuple[int, ...]

    def cycle(self, index: int) -> tuple[Step, ...]:
        """The steps of the cycle with this index, counted from 0."""
        if index < len(self.cycles):
            return self.cycles[index]
        return self.cycles[self.start + (index - self.start) % (len(self.cycles) - self.start)]

    @cached_property
    def loads(self) -> float:
        """Chunks that come to the device per cycle, in the repeating part."""
        return self._mean(dict.fromkeys(self.sizes, 1))

    @cached_property
    def traffic(self) -> float:
        """Bytes that come to the device per cycle, in the repeating part."""
        return self._mean(self.sizes)

    @cached_property
    def peak(self) -> int:
        """Most bytes on the device at any access."""
        return max(
            sum(map(self.sizes.__getitem__, step.resident)) + other
            for cycle in self.cycles
            for step, other in zip(cycle, self.others, strict=True)
        )

    def _mean(self, costs: Mapping[Chunk, int]) -> float:
        repeating = self.cycles[self.start :]
        moved = (c for cycle in repeating for step in cycle for c in step.load + step.prefetch)
        return sum(map(costs.__getitem__, moved)) / max(1, len(repeating))


class NextUse:
    """Distance to a chunk's next access in an endlessly repeated schedule.

    Args:
        trace: The schedule.
        volatile: Chunks whose device copy is worthless after the end of a cycle (the optimizer has changed them).
    """

    def __init__(self, trace: Sequence[Access], volatile: frozenset[Chunk] = frozenset()) -> None:
        self.length = len(trace)
        self.volatile = volatile
        self._next: list[dict[Chunk, int]] = [{} for _ in trace]
        ahead: dict[Chunk, int] = {}
        for repetition in (1, 0):
            for position in range(self.length - 1, -1, -1):
                ahead.update(dict.fromkeys(trace[position].chunks, position + repetition * self.length))
                if repetition == 0:
                    self._next[position] = dict(ahead)
        self._used = frozenset(ahead)

    def __call__(self, position: int, chunk: Chunk) -> int:
        """Accesses from ``position`` to the next one that needs the chunk; a huge number where there is none."""
        if chunk not in self._used or position >= self.length:
            return _NEVER
        found = self._next[position][chunk]
        if found >= self.length and chunk in self.volatile:
            return _NEVER
        return found - position


def choose_evictions(
    resident: frozenset[Chunk],
    needed: frozenset[Chunk],
    room: int,
    sizes: Mapping[Chunk, int],
    next_use: NextUse,
    position: int,
) -> tuple[Chunk, ...]:
    """What leaves so that ``needed`` fits: those with the farthest next use, and none more than must.

    Args:
        resident: On the device now.
        needed: Must be there after; never evicted.
        room: Bytes for chunks.
        sizes: Bytes of each chunk.
        next_use: The schedule.
        position: The access that needs them.
    """
    excess = sum(map(sizes.__getitem__, resident | needed)) - room
    evicted: list[Chunk] = []
    for chunk in sorted(resident - needed, key=lambda c: (-next_use(position, c), c)):
        if excess <= 0:
            break
        evicted.append(chunk)
        excess -= sizes[chunk]
    # Chunks differ in size: what was chosen early may be spared after a large one has gone.
    for chunk in reversed(evicted[:-1]):
        if excess + sizes[chunk] <= 0:
            evicted.remove(chunk)
            excess += sizes[chunk]
    return tuple(evicted)


def smallest_budget(trace: Sequence[Access], sizes: Mapping[Chunk, int]) -> int:
    """Bytes that the most demanding access takes: no plan needs more, and none does with less."""
    return max((sum(map(sizes.__getitem__, a.chunks)) + a.other for a in trace), default=0)


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
    next_use = NextUse(trace, volatile)
    limit = max(2, min(_CYCLES, _ACCESSES // max(1, len(trace))))
    cycles: list[tuple[Step, ...]] = []
    starts = [resident]
    while len(cycles) < limit and (len(starts) < 3 or starts[-1] not in starts[1:-1]):
        steps = _cycle(trace, sizes, budget, next_use, starts[-1])
        cycles.append(steps)
        starts.append((steps[-1].resident if steps else starts[-1]) - volatile)
    start, end = _period(cycles, starts, sizes)
    cycles = cycles[:end]
    if cycles and starts[start] != starts[end]:
        # The repetition is not exact: where it begins again, what differs is exchanged, so that part stands apart.
        first = cycles[start][0]
        arriving, leaving = first.resident - starts[end], starts[end] - first.resident
        again = Step(tuple(sorted(leaving)), tuple(sorted(arriving)), (), first.resident)
        cycles += [(again, *cycles[start][1:]), *cycles[start + 1 : end]]
        start = end
    planned = [_prefetch(cycle, trace, sizes, budget, lookahead) for cycle in cycles]
    return Plan(tuple(planned), start, budget, dict(sizes), tuple(a.other for a in trace))


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


def _prefetch(
    cycle: tuple[Step, ...], trace: Sequence[Access], sizes: Mapping[Chunk, int], budget: int, lookahead: int
) -> tuple[Step, ...]:
    """Starts loads earlier, together with the evictions that make room for them, where the room is there."""
    evict = [list(step.evict) for step in cycle]
    load = [list(step.load) for step in cycle]
    prefetch: list[list[Chunk]] = [[] for _ in cycle]
    resident = [set(step.resident) for step in cycle]
    free = [budget - a.other - sum(map(sizes.__getitem__, r)) for a, r in zip(trace, resident, strict=True)]
    for position in range(1, len(cycle)):
        for chunk in list(load[position]):
            issue, made = position, list(evict[position])
            for earlier in range(position - 1, max(-1, position - 1 - lookahead), -1):
                # Nobody may need between `earlier` and `position` what leaves to make room.
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
        Step(tuple(e), tuple(w), tuple(p), frozenset(r))
        for e, w, p, r in zip(evict, load, prefetch, resident, strict=True)
    )
