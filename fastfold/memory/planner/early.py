"""Early starts of copies to the device, where the budget allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fastfold.memory.planner.schedule import Access, Chunk, Span, Step

K = TypeVar("K")


def start_early(
    cycle: tuple[Step, ...], trace: Sequence[Access], sizes: Mapping[Chunk, int], budget: int, lookahead: int
) -> tuple[Step, ...]:
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
        Step(tuple(e), tuple(w), tuple(p), frozenset(r))
        for e, w, p, r in zip(evict, load, prefetch, resident, strict=True)
    )


def early_returns(
    cycle: Sequence[Step],
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
