"""Compare profiles with a whole database in several processes, with the results of one process.

Each process compares the profiles with its parts. HMMER's E-values depend on the number of sequences in the database,
so they are computed, and thresholds applied, when the hits of all parts are merged. HMMER's filters treat each sequence
separately. Therefore hits, scores, E-values and alignments equal those of one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from pyhmmer.easel import Alphabet, DigitalSequenceBlock, SequenceFile
from pyhmmer.plan7 import HMM, Pipeline, TopHits

from fastfold.data.search.database import (
    CHUNK_BYTES,
    MAX_RESIDUES,
    DatabasePart,
    SequenceDatabase,
    SkippedRecords,
    changed,
    record_name,
    record_problem,
    searchable_records,
    split_database,
)
from fastfold.errors import ConfigError, InputError
from fastfold.utils.workers.pool import InlinePool, WorkerPool

_ALLOCATION = 1.15  # the allocator's overhead over the reported size of sequences


class ShardTask(NamedTuple):
    """Profiles to compare with a part of a database."""

    part: DatabasePart
    profiles: Sequence[HMM]


class ShardHits(NamedTuple):
    """Hits in a part."""

    #: Hits of each profile; until they are merged, their E-values are those of a search in this part alone
    hits: list[TopHits]
    num_residues: int  #: Residues in the part
    is_kept: bool  #: True if the worker keeps the part in memory
    skipped: SkippedRecords = SkippedRecords()  #: Records that were left out


@dataclass
class ShardSearcher:
    """Searcher in parts of a database; one per worker."""

    #: Settings under the names of HMMER's pipeline: ``E``, ``incE``, ``F1`` and so on
    settings: Mapping[str, Any]
    memory_bytes: int  #: Memory limit for the kept parts
    _kept: dict[int, tuple[DigitalSequenceBlock, int, SkippedRecords]] = field(
        default_factory=dict, init=False, repr=False
    )
    _used: int = field(default=0, init=False, repr=False)

    def __call__(self, key: int, task: ShardTask) -> ShardHits:
        """Search a part.

        Raises:
            InputError: The part cannot be read.
        """
        block, num_residues, skipped = self._block(task.part)
        hits = []
        with flushed_denormals():
            for profile in task.profiles:
                pipeline = Pipeline(profile.alphabet, **self.settings)
                hits.append(pipeline.search_hmm(profile, block))
        return ShardHits(hits, num_residues, task.part.number in self._kept, skipped)

    def _block(self, part: DatabasePart) -> tuple[DigitalSequenceBlock, int, SkippedRecords]:
        """Return the sequences of a part, the number of their residues, and the skipped records."""
        if part.number in self._kept:
            return self._kept[part.number]
        try:
            text = part.read()
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror or error}", path=part.path) from None
        block, skipped = digitize_searchable(text, part)
        num_residues = sum(map(len, block))
        size = int(_ALLOCATION * (sys.getsizeof(block) + sum(map(sys.getsizeof, block))))
        if self._used + size <= self.memory_bytes:
            self._kept[part.number] = block, num_residues, skipped
            self._used += size
        return block, num_residues, skipped


def digitize_searchable(
    text: bytes, part: DatabasePart, *, keep_others: bool = False
) -> tuple[DigitalSequenceBlock, SkippedRecords]:
    """Return the sequences of the searchable FASTA records of a part, and the skipped records.

    ``keep_others`` is that of :func:`~fastfold.data.search.database.searchable_records`.
    """
    if b" mol:" not in text:  # checking each record takes as long as parsing all of them
        with contextlib.suppress(InputError):
            return digitize(text, part), SkippedRecords()
    text, skipped = searchable_records(text, keep_others=keep_others)
    return digitize(text, part), skipped


def digitize(text: bytes, part: DatabasePart) -> DigitalSequenceBlock:
    """Convert the FASTA records of a part to HMMER's form; bytes that are not UTF-8 become U+FFFD.

    Raises:
        InputError: A record is invalid; names it.
    """
    if not text.isascii():
        text = text.decode("utf-8", "replace").encode()
    enabled = gc.isenabled()
    gc.disable()  # it would traverse all sequences read so far repeatedly
    try:
        block = _parse(text)
    except ValueError as error:
        raise _explained(text, part, error) from None
    finally:
        if enabled:
            gc.enable()
    if block and len(block.largest()) > MAX_RESIDUES:
        longest = block.largest()
        raise InputError(
            f"has {len(longest):,} residues; HMMER compares sequences up to {MAX_RESIDUES:,}: remove the "
            "record or cut it",
            path=part.path,
            record=longest.name,
        )
    return block


def _parse(text: bytes) -> DigitalSequenceBlock:
    alphabet = Alphabet.amino()
    if not text.strip():
        return DigitalSequenceBlock(alphabet)
    with SequenceFile(io.BytesIO(text), format="fasta", digital=True, alphabet=alphabet) as file:
        block = file.read_block()
    return cast(DigitalSequenceBlock, block)


def _explained(text: bytes, part: DatabasePart, error: ValueError) -> InputError:
    """Return the error about records that cannot be parsed, with the name of the first bad one."""
    for record in (b"\n" + text).split(b"\n>")[1:]:
        try:
            _parse(b">" + record)
        except ValueError as one:
            # HMMER's own reason may refer to freed memory.
            why = record_problem(record) or str(one).rpartition(": ")[2].strip()
            return InputError(
                f"cannot be parsed ({why}); a database has plain sequences of letters without gaps",
                path=part.path,
                record=record_name(record),
            )
    return InputError(f"cannot be parsed ({error})", path=part.path)


_FLUSH_TO_ZERO = 1 << 15
_DENORMALS_ARE_ZERO = 1 << 6


class _Environment(ctypes.Structure):
    """``fenv_t`` of the C libraries of Linux on x86-64."""

    _fields_ = (("x87", ctypes.c_uint8 * 28), ("mxcsr", ctypes.c_uint32))


def _mathematics() -> ctypes.CDLL:
    """Return the library with ``fegetenv``: the C library in musl, a separate file in glibc."""
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:
        return ctypes.CDLL(None)


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush denormal numbers to zero in this thread inside, on Linux on x86-64, as HMMER's own programs do.

    ``pyhmmer`` does not, because the mode applies to everything in the thread. Without it, matrices full of denormal
    numbers slow a search with many hits down. Hits, scores and alignments are equal in both modes.
    """
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        yield
        return
    library = _mathematics()
    before, flushed = _Environment(), _Environment()
    library.fegetenv(ctypes.byref(before))
    library.fegetenv(ctypes.byref(flushed))
    flushed.mxcsr |= _FLUSH_TO_ZERO | _DENORMALS_ARE_ZERO
    library.fesetenv(ctypes.byref(flushed))
    try:
        yield
    finally:
        library.fesetenv(ctypes.byref(before))


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

    The settings have the names of HMMER's pipeline. One worker is this process alone. ``memory_bytes`` limits all
    processes together; the rest of the database, in chunks of ``chunk_bytes``, is read again for each :meth:`search`.

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
        self._kept: dict[int, DatabasePart] = {}
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
        all_hits: list[list[TopHits]] = [[] for _ in profiles]
        waiting: deque[list[DatabasePart]] = deque()
        num_residues = 0

        def collect() -> None:
            nonlocal num_residues
            for pool, part in zip(self._pools, waiting.popleft(), strict=True):
                outcome = self._outcome(pool)
                num_residues += outcome.num_residues
                self._skipped[part.number] = outcome.skipped
                if outcome.is_kept:
                    self._kept[part.number] = part._replace(text=None if part.text else part.text)
                for hits, own in zip(all_hits, outcome.hits, strict=True):
                    hits.append(own)
                    if len(hits) == _MERGED_AT_ONCE:
                        hits[:] = [hits[0].merge(*hits[1:])]
                if report is not None:
                    report(part.num_bytes, outcome.num_residues)

        parts: list[DatabasePart] = []
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
        return [hits[0].merge(*hits[1:]) if len(hits) > 1 else hits[0] for hits in all_hits]

    @property
    def skipped(self) -> SkippedRecords:
        """Records left out of the last search."""
        return sum(self._skipped.values(), SkippedRecords())

    def _rounds(self) -> Iterator[list[DatabasePart]]:
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
