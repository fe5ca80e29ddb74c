"""Which draws of an endless order a rank has consumed, kept as a position and the few draws left open before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastfold.errors import ConfigError


class ConsumedDraws:
    """The draws r, r + n, r + 2n, ... of rank ``r`` of ``n``: those before a frontier are consumed, but for some.

    Args:
        rank: This process, from 0.
        ranks: Number of processes that share the order.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._frontier = rank
        self._open: set[int] = set()

    def add(self, number: int) -> None:
        """Marks a draw of this rank as consumed; it must not be yet."""
        if number < self._frontier:
            self._open.remove(number)
        else:
            self._open.update(range(self._frontier, number, self._ranks))
            self._frontier = number + self._ranks

    def __contains__(self, number: int) -> bool:
        return number < self._frontier and number not in self._open

    def rest(self) -> Iterator[int]:
        """All other draws of this rank, in order and without end; as of the moment of the first one."""
        number = self._frontier
        yield from sorted(self._open)
        while True:
            yield number
            number += self._ranks

    def state(self) -> dict[str, Any]:
        """Plain numbers that JSON can hold."""
        return {
            "rank": self._rank,
            "ranks": self._ranks,
            "frontier": self._frontier,
            "open": sorted(self._open),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of this rank, or the merged one of all ranks.

        Raises:
            ConfigError: The state is that of another rank, or of another number of ranks.
        """
        if state["ranks"] != 1 and (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise ConfigError(
                f"a loader state of rank {state['rank']} of {state['ranks']} cannot continue as rank {self._rank} "
                f"of {self._ranks}; merge the states of all ranks first"
            )
        frontier = state["frontier"]
        # The first draw of this rank that is not before the state's frontier.
        self._frontier = frontier + (self._rank - frontier) % self._ranks
        self._open = {number for number in state["open"] if number % self._ranks == self._rank}


def merge_draws(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one rank that has consumed what the ranks of a run have consumed together.

    Raises:
        ConfigError: The states are not those of all ranks of one run.
    """
    ranks = len(states)
    if sorted((state["rank"], state["ranks"]) for state in states) != [(r, ranks) for r in range(ranks)]:
        found = ", ".join(f"{state['rank']} of {state['ranks']}" for state in states) or "none"
        raise ConfigError(f"states of all ranks of one run are needed, but these are of rank {found}")
    end = max((state["frontier"] for state in states), default=0)
    left = {number for state in states for number in state["open"]}
    for state in states:
        left.update(range(state["frontier"], end, ranks))
    # Ranks that have drawn equally often leave no gap but at the end, where it is none.
    while end > 0 and end - 1 in left:
        end -= 1
        left.remove(end)
    return {"rank": 0, "ranks": 1, "frontier": end, "open": sorted(left)}
