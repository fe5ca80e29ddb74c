"""Data types of plans: accesses, steps, plans, and the rule of farthest next use.

A schedule repeats: every training step and every recycle uses the chunks in the same order. The next use of each chunk
is therefore known. The chunk used farthest in the future is evicted first (Belady, IBM Systems Journal 5, 1966). For
chunks of one size this order is optimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fastfold.errors import ConfigError

Chunk = int
_NEVER = 1 << 60


class BudgetError(ConfigError):
    """Budget that is smaller than the needs of one operator.

    ``smallest`` is the smallest sufficient budget in bytes, as far as known.

    Example:
        >>> from fastfold.memory import Access, BudgetError, plan
        >>> trace, sizes = [Access(frozenset({0, 1}), other=5)], {0: 10, 1: 20}
        >>> try:
        ...     plan(trace, sizes, budget=30)
        ... except BudgetError as error:
        ...     print(plan(trace, sizes, budget=error.smallest).peak)
        35
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class Access:
    """Chunks that an operator needs on the device, and bytes of other tensors there (activations, workspaces).

    Example:
        >>> from fastfold.memory import Access, smallest_budget
        >>> attention = Access(frozenset({0, 1}), other=300)  # two chunks of parameters, and its scores
        >>> smallest_budget([attention], sizes={0: 400, 1: 100})
        800
    """

    chunks: frozenset[Chunk]
    other: int = 0


@dataclass(frozen=True)
class Span:
    """Tensor that can be kept or offloaded between two accesses.

    Example:
        >>> from fastfold.memory import Access, Span, with_spans
        >>> trace = [Access(frozenset(), other=1) for _ in range(4)]
        >>> [access.other for access in with_spans(trace, [Span(size=10, first=1, last=2)])]
        [1, 11, 11, 1]
    """

    size: int  #: Bytes
    first: int  #: Access that creates it
    #: Access that uses it; later it counts as a part of ``Access.other``, whether it was kept or not
    last: int


@dataclass(frozen=True)
class AccessStep:
    """Actions at one access, in this order."""

    evict: tuple[Chunk, ...]  #: Chunks that leave the device before the operator runs
    load: tuple[Chunk, ...]  #: Chunks copied to the device before the operator runs
    prefetch: tuple[Chunk, ...]  #: Chunks whose copy starts while the operator runs, for a later one
    resident: frozenset[Chunk]  #: Chunks on the device, or being copied to it, while the operator runs


@dataclass(frozen=True)
class Plan:
    """Residency at every access of an endlessly repeated schedule.

    Example:
        >>> from fastfold.memory import Access, plan
        >>> trace = [Access(frozenset({layer})) for layer in (0, 1, 2, 1)]
        >>> made = plan(trace, sizes={0: 10, 1: 10, 2: 10}, budget=20)
        >>> made.peak, made.traffic
        (20, 20.0)
        >>> [sorted(step.resident) for step in made.cycle(1)]
        [[0, 1], [1, 2], [1, 2], [1]]
    """

    cycles: tuple[tuple[AccessStep, ...], ...]  #: Steps of each cycle, one for each access
    start: int  #: Number of the cycle from which the list repeats after its end
    budget: int  #: Bytes on the device
    sizes: Mapping[Chunk, int]  #: Bytes of each chunk
    others: tuple[int, ...]  #: Bytes of other tensors at each access

    def cycle(self, index: int) -> tuple[AccessStep, ...]:
        """Return the steps of a cycle, counted from 0."""
        if index < len(self.cycles):
            return self.cycles[index]
        return self.cycles[self.start + (index - self.start) % (len(self.cycles) - self.start)]

    @cached_property
    def loads(self) -> float:
        """Number of chunk loads per cycle, in the repeating part."""
        return self._mean(dict.fromkeys(self.sizes, 1))

    @cached_property
    def traffic(self) -> float:
        """Bytes loaded per cycle, in the repeating part."""
        return self._mean(self.sizes)

    @cached_property
    def peak(self) -> int:
        """Peak in bytes on the device."""
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
    """Distance to the next access of a chunk, in an endlessly repeated schedule."""

    # The device copies of ``volatile`` chunks are invalid after a cycle, because the optimizer has changed them.

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
        """Return the accesses from ``position`` to the chunk's next use; a huge number if there is none."""
        if chunk not in self._used or position >= self.length:
            return _NEVER
        access = self._next[position][chunk]
        if access >= self.length and chunk in self.volatile:
            return _NEVER
        return access - position


def choose_evictions(
    resident: frozenset[Chunk],
    needed: frozenset[Chunk],
    room: int,
    sizes: Mapping[Chunk, int],
    next_use: NextUse,
    position: int,
) -> tuple[Chunk, ...]:
    """Choose the fewest chunks to evict so that ``needed`` fits, farthest next use first.

    The access at ``position`` needs the chunks, which are never evicted; ``room`` is the bytes for chunks.
    """
    excess = sum(map(sizes.__getitem__, resident | needed)) - room
    if excess <= 0:
        return ()
    evicted: list[Chunk] = []
    for chunk in sorted(resident - needed, key=lambda c: (-next_use(position, c), c)):
        if excess <= 0:
            break
        evicted.append(chunk)
        excess -= sizes[chunk]
    # Chunks differ in size: after a large one is evicted, an earlier choice may be spared.
    for chunk in reversed(evicted[:-1]):
        if excess + sizes[chunk] <= 0:
            evicted.remove(chunk)
            excess += sizes[chunk]
    return tuple(evicted)


def smallest_budget(trace: Sequence[Access], sizes: Mapping[Chunk, int]) -> int:
    """Return the bytes of the largest access, which is the smallest budget that works.

    Example:
        >>> from fastfold.memory import Access, smallest_budget
        >>> trace = [Access(frozenset({0}), other=5), Access(frozenset({0, 1}))]
        >>> smallest_budget(trace, sizes={0: 10, 1: 20})
        30
    """
    return max((sum(map(sizes.__getitem__, a.chunks)) + a.other for a in trace), default=0)
