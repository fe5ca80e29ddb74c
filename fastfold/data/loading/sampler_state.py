"""Consumed draws of an endless order, as a frontier and the open draws before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastfold.errors import ConfigError


class ConsumedDraws:
    """Consumed draws of rank ``r`` of ``n``, which takes r, r + n, r + 2n, ...

    All draws before a frontier are consumed, with listed exceptions.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._frontier = rank
        self._open: set[int] = set()

    def add(self, number: int) -> None:
        """Mark a draw of this rank as consumed; it must not be consumed already."""
        if number < self._frontier:
            self._open.remove(number)
        else:
            self._open.update(range(self._frontier, number, self._ranks))
            self._frontier = number + self._ranks

    def __contains__(self, number: int) -> bool:
        return number < self._frontier and number not in self._open

    def rest(self) -> Iterator[int]:
        """Yield all other draws of this rank endlessly, in order, as of the first request."""
        number = self._frontier
        yield from sorted(self._open)
        while True:
            yield number
            number += self._ranks

    def state(self) -> dict[str, Any]:
        """Return the state as plain numbers for JSON."""
        return {
            "rank": self._rank,
            "ranks": self._ranks,
            "frontier": self._frontier,
            "open": sorted(self._open),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state of this rank, or the merged one of all ranks.

        Raises:
            ConfigError: The state belongs to another rank, or to another number of ranks.
        """
        if state["ranks"] != 1 and (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise ConfigError(
                f"a loader state of rank {state['rank']} of {state['ranks']} cannot continue as rank {self._rank} "
                f"of {self._ranks}; merge the states of all ranks first"
            )
        frontier = state["frontier"]
        # The first draw of this rank after the state's frontier.
        self._frontier = frontier + (self._rank - frontier) % self._ranks
        self._open = {number for number in state["open"] if number % self._ranks == self._rank}


def merge_draws(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks to one that has consumed their draws.

    Raises:
        ConfigError: The states do not belong to all ranks of one run.
    """
    ranks = len(states)
    if sorted((state["rank"], state["ranks"]) for state in states) != [(r, ranks) for r in range(ranks)]:
        found = ", ".join(f"{state['rank']} of {state['ranks']}" for state in states) or "none"
        raise ConfigError(f"expected the states of all ranks of one run, found rank {found}")
    end = max((state["frontier"] for state in states), default=0)
    left = {number for state in states for number in state["open"]}
    for state in states:
        left.update(range(state["frontier"], end, ranks))
    # Ranks with equal numbers of draws leave gaps only at the end, which need not be listed.
    while end > 0 and end - 1 in left:
        end -= 1
        left.remove(end)
    return {"rank": 0, "ranks": 1, "frontier": end, "open": sorted(left)}
