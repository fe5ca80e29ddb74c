"""Loads that start before they are needed, where the room is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastfold.memory.schedule import Access, Chunk, Step


def start_early(
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
