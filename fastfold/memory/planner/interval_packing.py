"""Packing of residency intervals into the free memory, which decides the chunks kept between two uses.

In a repeated schedule, a chunk that stays from one use to the next saves one load. Each interval takes its chunk's
bytes at all accesses in between, and the saved bytes are maximised. For chunks of one size, farthest next use is
optimal (Belady 1966). For several sizes the problem is NP-hard (Chrobak, Woeginger, Makino and Xu, "Caching is hard",
Algorithmica 63, 2012). There the result of farthest next use is improved by exchanges: one interval for cheaper ones,
or several for an expensive one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

# Accesses examined before the search for exchanges ends.
_WORK = 400_000
# Largest number of intervals removed for one that is added.
_DEPTH = 3
# Restarts with some intervals removed at random, from a fixed seed.
_RESTARTS = 16


@dataclass(frozen=True)
class ResidencyInterval:
    """Interval between two uses of a chunk."""

    chunk: int
    start: int  #: First access after the first use, counted over the whole period, which is cyclic
    length: int  #: Number of accesses until the next use
    size: int  #: Bytes


def residency_intervals(
    uses: Sequence[Collection[int]], sizes: Mapping[int, int], cycles: int, volatile: Collection[int]
) -> list[ResidencyInterval]:
    """Return every interval between two uses of an endlessly repeated schedule, of one period of ``cycles`` cycles.

    ``uses`` are the chunks at each access of one cycle. Uses at adjacent accesses have none between them, and
    ``volatile`` chunks none from one cycle to the next.
    """
    length = len(uses)
    period = cycles * length
    positions: dict[int, list[int]] = {}
    for cycle in range(cycles):
        for position, used in enumerate(uses):
            for chunk in used:
                positions.setdefault(chunk, []).append(cycle * length + position)
    intervals = []
    for chunk, places in sorted(positions.items()):
        for here, after in zip(places, [*places[1:], places[0] + period], strict=True):
            if chunk in volatile and here // length != after // length:
                continue
            # An empty interval is always kept: the chunk is used before and after.
            intervals.append(ResidencyInterval(chunk, here + 1, after - here - 1, sizes[chunk]))
    return intervals


class IntervalPacking:
    """Kept intervals, by their indices, and the memory that remains free.

    The room is the free bytes at each access of the period, next to the chunks in use.
    """

    def __init__(
        self, room: Sequence[int], intervals: Sequence[ResidencyInterval], kept: Iterable[int]
    ) -> None:
        self.intervals, self.kept = intervals, set(kept)
        self._slack = np.array(room, dtype=np.int64)
        self._starts = np.array([interval.start for interval in intervals], dtype=np.int64)
        self._lengths = np.array([interval.length for interval in intervals], dtype=np.int64)
        self._cover: list[set[int]] = [set() for _ in room]
        self._work = 0
        for index in self.kept:
            self._put(index, -1)
        assert self._slack.min(initial=0) >= 0, "the initial intervals exceed the room"

    def _spans(self, index: int) -> tuple[slice, slice]:
        interval, period = self.intervals[index], len(self._slack)
        self._work += interval.length + 20
        start, end = interval.start % period, interval.start % period + interval.length
        return slice(start, min(end, period)), slice(0, max(0, end - period))

    def _put(self, index: int, sign: int) -> None:
        for span in self._spans(index):
            self._slack[span] += sign * self.intervals[index].size
            for covered in self._cover[span]:
                covered.symmetric_difference_update({index})

    def _add(self, index: int) -> None:
        self.kept.add(index)
        self._put(index, -1)

    def _remove(self, index: int) -> None:
        self.kept.discard(index)
        self._put(index, 1)

    def _tightest(self, index: int) -> tuple[int, int]:
        """Return the smallest free room over an interval's accesses, and its access."""
        smallest, access = 1 << 62, -1
        for span in self._spans(index):
            part = self._slack[span]
            if len(part):
                lowest = int(part.argmin())
                if part[lowest] < smallest:
                    smallest, access = int(part[lowest]), span.start + lowest
        return smallest, access

    def fill(self, order: Iterable[int]) -> list[int]:
        """Keep each further interval that fits, in this order; return the added ones."""
        added = []
        for index in order:
            if index not in self.kept and self._tightest(index)[0] >= self.intervals[index].size:
                self._add(index)
                added.append(index)
        return added

    @property
    def saved(self) -> int:
        """Bytes per period that need not be loaded."""
        return sum(self.intervals[index].size for index in self.kept)

    def improve(self) -> None:
        """Exchange intervals until no tried exchange saves more bytes; deterministic."""
        order = [(x.length, -x.size, i) for i, x in enumerate(self.intervals)]
        shortest = [i for _, _, i in sorted(order)]
        largest = [i for _, _, i in sorted(order, key=lambda x: (x[1], x[0], x[2]))]
        self.fill(shortest)
        if len(self.kept) == len(self.intervals):
            return
        self._climb(shortest, largest)
        random = Random(0)
        for _ in range(_RESTARTS):
            if self._work > _WORK or len(self.kept) == len(self.intervals):
                return
            before, saved = set(self.kept), self.saved
            outside = sorted(set(range(len(self.intervals))) - self.kept)
            wanted = random.choice(outside)
            for index in sorted(self._against(wanted)):
                self._remove(index)
            if self._tightest(wanted)[0] >= self.intervals[wanted].size:
                self._add(wanted)
            self.fill(random.sample(shortest, len(shortest)))
            self._climb(shortest, largest)
            if self.saved < saved:
                for index in self.kept - before:
                    self._remove(index)
                for index in before - self.kept:
                    self._add(index)

    def _against(self, wanted: int) -> set[int]:
        """Return the kept intervals at accesses where the wanted one does not fit."""
        opposed: set[int] = set()
        for span in self._spans(wanted):
            for slack, covered in zip(self._slack[span], self._cover[span], strict=True):
                if slack < self.intervals[wanted].size:
                    opposed |= covered
        return opposed

    def _climb(self, shortest: Sequence[int], largest: Sequence[int]) -> None:
        ranks = [{index: rank for rank, index in enumerate(order)} for order in (shortest, largest)]
        better = True
        while better and self._work < _WORK:
            better = sum(self._bring(i) for i in largest if i not in self.kept) > 0
            better |= sum(self._release(i, ranks) for i in sorted(self.kept) if i in self.kept) > 0
            self.fill(shortest)

    def _bring(self, wanted: int) -> bool:
        """Keep an interval in exchange for cheaper ones, if possible."""
        if self._exchange(wanted, self.intervals[wanted].size, _DEPTH):
            self._add(wanted)
            return True
        return False

    def _exchange(self, wanted: int, worth: int, depth: int) -> bool:
        """Remove kept intervals worth less than ``worth`` bytes so that the wanted one fits; False if impossible."""
        least, where = self._tightest(wanted)
        if self._work > _WORK:
            return False
        if least >= self.intervals[wanted].size:
            return True
        if depth == 0:
            return False
        candidates = sorted(
            (i for i in self._cover[where] if self.intervals[i].size < worth),
            key=lambda i: (self.intervals[i].size, -self.intervals[i].length, i),
        )
        for index in candidates:
            self._remove(index)
            if self._exchange(wanted, worth - self.intervals[index].size, depth - 1):
                return True
            self._add(index)
        return False

    def _release(self, index: int, orders: Sequence[Mapping[int, int]]) -> bool:
        """Remove one interval if others that then fit save more."""
        if self._work > _WORK:
            return False
        size = self.intervals[index].size
        near = self._near(index)
        for order in orders:
            self._remove(index)
            added = self.fill(sorted(near, key=order.__getitem__))
            if sum(self.intervals[i].size for i in added) > size:
                return True
            for other in added:
                self._remove(other)
            self._add(index)
        return False

    def _near(self, index: int) -> list[int]:
        """Return the other intervals that share an access with this one."""
        period, interval = len(self._slack), self.intervals[index]
        self._work += len(self.intervals) // 10
        after = (self._starts - interval.start) % period < interval.length
        before = (interval.start - self._starts) % period < self._lengths
        return [i for i in np.flatnonzero(after | before).tolist() if i not in self.kept and i != index]

    def resident(self) -> list[frozenset[int]]:
        """Return the chunks kept at each access of the period, without those in use."""
        return [frozenset(self.intervals[i].chunk for i in covered) for covered in self._cover]
