"""Worker of a search: parts of a database as digital sequences, compared with profiles.

A worker keeps its parts within its share of the memory for the next profiles; the rest is read again each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from pyhmmer.easel import Alphabet, DigitalSequenceBlock, SequenceFile
from pyhmmer.plan7 import HMM, Pipeline, TopHits

from fastfold.data.search.chunks import (
    MAX_RESIDUES,
    Part,
    SkippedRecords,
    record_name,
    record_problem,
    searchable_records,
)
from fastfold.errors import InputError

_ALLOCATION = 1.15  # the allocator's overhead over the reported size of sequences


class ShardTask(NamedTuple):
    """Profiles to compare with a part of a database."""

    part: Part
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

    def _block(self, part: Part) -> tuple[DigitalSequenceBlock, int, SkippedRecords]:
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
    text: bytes, part: Part, *, keep_others: bool = False
) -> tuple[DigitalSequenceBlock, SkippedRecords]:
    """Return the sequences of the searchable FASTA records of a part, and the skipped records.

    ``keep_others`` is that of :func:`~fastfold.data.search.chunks.searchable_records`.
    """
    if b" mol:" not in text:  # checking each record takes as long as parsing all of them
        with contextlib.suppress(InputError):
            return digitize(text, part), SkippedRecords()
    text, skipped = searchable_records(text, keep_others=keep_others)
    return digitize(text, part), skipped


def digitize(text: bytes, part: Part) -> DigitalSequenceBlock:
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


def _explained(text: bytes, part: Part, error: ValueError) -> InputError:
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
