"""Compare profiles with a whole database in several processes, with the results of one process.

Each process compares the profiles with its parts. HMMER's E-values depend on the number of sequences in the database,
so they are computed, and thresholds applied, when the hits of all parts are merged. HMMER's filters treat each sequence
separately. Therefore hits, scores, E-values and alignments equal those of one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyhmmer.plan7 import HMM, TopHits

from fastfold.data.search.chunks import CHUNK_BYTES, Part, SkippedRecords, split_database
from fastfold.data.search.database import SequenceDatabase, changed
from fastfold.data.search.shards import ShardHits, ShardSearcher, ShardTask
from fastfold.errors import ConfigError, InputError
from fastfold.utils.workers.pool import InlinePool, WorkerPool

Report = Callable[[int, int], None]
"""Callback with bytes of the database, and residues in them, after each compared part."""

_PROCESS_BYTES = 80 << 20  # Python, pyhmmer and HMMER's matrices
_EXPANSION = 7  # memory of a part of short sequences, as text and in HMMER's form, per byte of text
_PART_BYTES = 16 << 20
_SMALLEST_PART = 1 << 20
_AHEAD = 2  # parts that a worker may have queued
_MERGED_AT_ONCE = 32


def smallest_memory() -> int:
    """Return the smallest memory of each process in bytes."""
    return _PROCESS_BYTES + _EXPANSION * _SMALLEST_PART


class ShardPool:
    """Processes that share a database; a context manager.

    Args:
        database: The database.
        settings: Settings under the names of HMMER's pipeline.
        num_workers: Number of processes; 1 for only this one.
        memory_bytes: Memory limit for all processes together. The rest of the database is read again for each call of
            :meth:`search`.
        chunk_bytes: Length of the distributed chunks of the database.

    Raises:
        ConfigError: The memory is too small for this number of processes.
    """

    def __init__(
        self,
        database: SequenceDatabase,
        settings: Mapping[str, Any],
        *,
        num_workers: int,
        memory_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        share = memory_bytes // num_workers - _PROCESS_BYTES
        if share < _EXPANSION * _SMALLEST_PART:
            needed = num_workers * smallest_memory()
            raise ConfigError(
                f"a memory of {memory_bytes >> 20} MiB is too small to search with {num_workers} processes, which need "
                f"{-(-needed >> 20)} MiB; allow more memory or fewer processes"
            )
        self._part_bytes = max(_SMALLEST_PART, min(_PART_BYTES, share // (2 * _EXPANSION)))
        searcher = ShardSearcher(settings, share - _EXPANSION * self._part_bytes)
        self._database, self._chunk_bytes = database, chunk_bytes
        self._state = database.state()
        self._num_residues: int | None = None
        self._skipped: dict[int, SkippedRecords] = {}
        self._kept: dict[int, Part] = {}
        self._complete = False
        self._pools: list[InlinePool | WorkerPool] = (
            [InlinePool(searcher)]
            if num_workers == 1
            else [WorkerPool(searcher, 1) for _ in range(num_workers)]
        )

    def __enter__(self) -> ShardPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.close()

    def search(self, profiles: Sequence[HMM], report: Report | None = None) -> list[TopHits]:
        """Compare profiles with every sequence of the database; return the hits of each, best first.

        Raises:
            InputError: The database cannot be read, contains no protein, or was changed during the search.
        """
        found: list[list[TopHits]] = [[] for _ in profiles]
        waiting: deque[list[Part]] = deque()
        num_residues = 0

        def collect() -> None:
            nonlocal num_residues
            for pool, part in zip(self._pools, waiting.popleft(), strict=True):
                outcome = self._outcome(pool)
                num_residues += outcome.num_residues
                self._skipped[part.number] = outcome.skipped
                if outcome.is_kept:
                    self._kept[part.number] = part._replace(text=None if part.text else part.text)
                for hits, own in zip(found, outcome.hits, strict=True):
                    hits.append(own)
                    if len(hits) == _MERGED_AT_ONCE:
                        hits[:] = [hits[0].merge(*hits[1:])]
                if report is not None:
                    report(part.num_bytes, outcome.num_residues)

        parts: list[Part] = []
        for round_ in self._rounds():
            parts += round_
            waiting.append(round_)
            for pool, part in zip(self._pools, round_, strict=True):
                pool.submit(part.number, ShardTask(self._kept.get(part.number, part), profiles))
            if len(waiting) == _AHEAD:
                collect()
        while waiting:
            collect()
        if self._database.state() != self._state or self._num_residues not in (None, num_residues):
            raise changed(self._database)
        if not num_residues:
            skipped = f" ({self.skipped})" if any(self.skipped) else ""
            raise InputError(
                f"contains no sequences of proteins; it cannot be searched{skipped}", path=self._database.path
            )
        self._num_residues = num_residues
        self._complete = len(self._kept) == len(parts)
        return [hits[0].merge(*hits[1:]) if len(hits) > 1 else hits[0] for hits in found]

    @property
    def skipped(self) -> SkippedRecords:
        """Records left out of the last search."""
        return sum(self._skipped.values(), SkippedRecords())

    def _rounds(self) -> Iterator[list[Part]]:
        """Yield the parts of the database, one per worker at a time."""
        workers = len(self._pools)
        if self._complete:
            for first in range(0, len(self._kept), workers):
                yield [self._kept[first + worker] for worker in range(workers)]
            return
        try:
            yield from split_database(
                self._database.path, workers, self._part_bytes, chunk_bytes=self._chunk_bytes
            )
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror or error}", path=self._database.path) from None

    def _outcome(self, pool: InlinePool | WorkerPool) -> ShardHits:
        outcome = pool.next_outcome()
        if outcome.failure is not None:
            place = str(self._database.path)
            message = outcome.failure if outcome.failure.startswith(place) else f"{place}: {outcome.failure}"
            raise InputError(message)
        hits: ShardHits = outcome.value
        return hits
