"""Features of the next pass, which a thread draws while a GPU computes this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")


class DrawnAhead(Generic[T]):
    """Function ``draw(cycle, member)`` for calls in the order of passes, whose next result a thread prepares.

    Args:
        draw: The function; equal arguments give equal results, in any thread.
        cycles: Number of cycles.
        members: Number of members in each cycle.

    Example:
        >>> from fastfold.inference.folding.drawn_ahead import DrawnAhead
        >>> draw = DrawnAhead(lambda cycle, member: (cycle, member), cycles=2, members=1)
        >>> draw(0, 0), draw(1, 0), draw(0, 0)
        ((0, 0), (1, 0), (0, 0))
    """

    def __init__(self, draw: Callable[[int, int], T], *, cycles: int, members: int) -> None:
        self._draw, self._cycles, self._members = draw, cycles, members
        self._next: tuple[tuple[int, int], Future[T]] | None = None

    def __call__(self, cycle: int, member: int) -> T:
        """Return ``draw(cycle, member)``, and begin the next one."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == (cycle, member):
            result = ahead[1].result()
        else:
            result = self._draw(cycle, member)
        after = divmod(cycle * self._members + member + 1, self._members)
        if after[0] < self._cycles:
            self._next = after, _thread().submit(self._draw, *after)
        return result


@cache
def _thread() -> ThreadPoolExecutor:
    # One thread is enough: a batch's targets wait for each other anyway.
    return ThreadPoolExecutor(1, "features")
