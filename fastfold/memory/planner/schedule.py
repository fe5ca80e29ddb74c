"""What planning is about: accesses, steps, plans, and the rule of farthest next use.

A schedule repeats: every training step and every recycle touches the chunks in the order of the last one. So the next
use of each chunk is known, and what is needed farthest in the future leaves first (Belady, IBM Systems Journal 5,
1966), with the schedule's beginning following its end. For chunks of one size no other order loads less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fastfold.errors import ConfigError

Chunk = int
_NEVER = 1 << 60


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
class Span:
    """Something that may stay on the device from one access to another, or leave for that time.

    Args:
        size: Bytes.
        first: Access at which it comes to be.
        last: Access during which it is used; after that it counts as a part of ``Access.other``, whether it has
            stayed or not.
    """

    size: int
    first: int
    last: int


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
