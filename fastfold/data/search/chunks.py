"""Split a FASTA database into parts for several workers, without reading it as a whole, and filter its records.

A file is divided into chunks of equal length; each owns the records whose ``>`` is in it. Chunks are distributed
round-robin, because relatives are often adjacent in a database and should not all go to one worker. A worker reads its
chunks of a plain file itself. A compressed file is decompressed once, here, and its text is distributed.

``pdb_seqres.txt`` also contains nucleic acids (``mol:na``), some with letters that are not residues, at which HMMER
stops.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fastfold.errors import InputError
from fastfold.utils.text_files import GZIP_MAGIC

CHUNK_BYTES = 1 << 18
_PIECE = 1 << 16


class Part(NamedTuple):
    """Part of a database that one worker searches at a time."""

    number: int  #: Index among the parts of the database, from zero
    path: Path  #: Path of the database
    #: First and last (exclusive) byte of each of its chunks, for a plain file
    chunks: tuple[tuple[int, int], ...]
    #: Its records, for a compressed file; None for a plain one, and after a worker received them
    text: bytes | None
    num_bytes: int  #: Corresponding bytes of the file

    def read(self) -> bytes:
        """Read the records of the part.

        Raises:
            OSError: The file cannot be read, or the worker with the text of a compressed file was lost.
        """
        if self.text is not None:
            return self.text
        if not self.chunks:
            raise OSError("a worker process was lost; search again, finished results are kept")
        with self.path.open("rb") as file:
            return b"".join(_records(file, start, end) for start, end in self.chunks)


def is_compressed(path: Path) -> bool:
    """Return True for a gzip file with any name.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


def split_database(
    path: Path, workers: int, part_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[list[Part]]:
    """Split a database into rounds of one part per worker; a part may be empty.

    Raises:
        InputError: A compressed file is damaged.
        OSError: The file cannot be read.
    """
    chunks = max(1, part_bytes // chunk_bytes) * workers
    if is_compressed(path):
        for number, (texts, num_bytes) in enumerate(_packed_rounds(path, chunks, chunk_bytes)):
            share = num_bytes // workers
            yield [
                Part(number * workers + worker, path, (), b"".join(texts[worker::workers]), share)
                for worker in range(workers)
            ]
        return
    size = os.path.getsize(path)
    starts = range(0, size, chunk_bytes)
    for number, first in enumerate(range(0, len(starts), chunks)):
        ranges = [(start, min(start + chunk_bytes, size)) for start in starts[first : first + chunks]]
        dealt = [tuple(ranges[worker::workers]) for worker in range(workers)]
        yield [
            Part(
                number * workers + worker,
                path,
                own,
                None if own else b"",
                sum(end - start for start, end in own),
            )
            for worker, own in enumerate(dealt)
        ]


def _records(file: BinaryIO, start: int, end: int) -> bytes:
    """Return the records of a plain file whose ``>`` is between two bytes."""
    begin = 0 if start == 0 else _next_record(file, start)
    if begin is None or begin >= end:
        return b""
    stop = _next_record(file, end)
    file.seek(begin)
    return file.read(-1 if stop is None else stop - begin)


def _next_record(file: BinaryIO, offset: int) -> int | None:
    """Return the first line start with ``>`` from ``offset`` (at least 1) on; None without one."""
    place = offset - 1
    file.seek(place)
    kept = b""
    while piece := file.read(_PIECE):
        found = (kept + piece).find(b"\n>")
        if found >= 0:
            return place - len(kept) + found + 1
        place += len(piece)
        kept = piece[-1:]
    return None


def _packed_rounds(path: Path, chunks: int, chunk_bytes: int) -> Iterator[tuple[list[bytes], int]]:
    """Yield the texts of some chunks of a compressed file, with the number of their compressed bytes."""
    texts: list[bytes] = []
    before = 0
    with path.open("rb") as raw:
        for text in _unpacked_chunks(raw, path, chunk_bytes):
            texts.append(text)
            if len(texts) == chunks:
                yield texts, raw.tell() - before
                texts, before = [], raw.tell()
        if texts:
            yield texts, raw.tell() - before


def _unpacked_chunks(raw: BinaryIO, path: Path, chunk_bytes: int) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            # ``held`` begins at byte ``place`` of the decompressed file.
            held, place, end = b"", 0, chunk_bytes
            while piece := file.read(chunk_bytes):
                held += piece
                while (found := held.find(b"\n>", max(0, end - 1 - place))) >= 0:
                    yield held[: found + 1]
                    held, place, end = held[found + 1 :], place + found + 1, end + chunk_bytes
            if held:
                yield held
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"is a damaged gzip file ({error}); download or copy it again", path=path) from None


MAX_RESIDUES = 100_000  #: Longest sequence of a database that HMMER compares

_OTHER_MOLECULE = re.compile(rb"\S+[ \t]+mol:(?!protein\b)")
_IN_SEQUENCES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*._~ \t\r\n"
_SPACE = b" \t\r\n"


class SkippedRecords(NamedTuple):
    """Records left out of a search."""

    others: int = 0  #: Number of records that are not proteins by their headers
    unreadable: int = 0  #: Number of records that HMMER cannot read
    example: str = ""  #: Name of the first unreadable record, with the reason

    def __add__(self, more: object) -> SkippedRecords:
        if not isinstance(more, SkippedRecords):
            return NotImplemented
        return SkippedRecords(
            self.others + more.others, self.unreadable + more.unreadable, self.example or more.example
        )

    def __str__(self) -> str:
        parts = [f"{self.others:,} that are not proteins (mol:na)"] if self.others else []
        parts += [f"{self.unreadable:,} that cannot be read ({self.example})"] if self.unreadable else []
        return f"records left out of the search: {' and '.join(parts) or 'none'}"


def searchable_records(text: bytes, *, keep_others: bool = False) -> tuple[bytes, SkippedRecords]:
    """Remove the records of a FASTA text that a protein search cannot use, and count them.

    ``keep_others`` counts records of other molecules, but keeps those that HMMER can read.
    """
    kept: list[bytes] = []
    others = unreadable = 0
    example = ""
    for record in (b"\n" + text).split(b"\n>")[1:]:
        is_other = _OTHER_MOLECULE.match(record) is not None
        problem = record_problem(record)
        others += is_other
        if problem and not is_other:
            unreadable += 1
            example = example or f"{record_name(record)[:60]!r}: {problem}"
        if not problem and (keep_others or not is_other):
            kept.append(b">" + record)
    return b"\n".join(kept), SkippedRecords(others, unreadable, example)


def record_problem(record: bytes) -> str:
    """Return HMMER's reason why it cannot read a record, the text after ``>``; empty if it can."""
    header, _, body = record.partition(b"\n")
    if not header[:1].strip():
        return "no FASTA name found"
    foreign = body.translate(None, _IN_SEQUENCES)
    if foreign:
        return f"illegal character {chr(foreign[0])}"
    length = len(body.translate(None, _SPACE))
    if length > MAX_RESIDUES:
        return f"{length:,} residues, HMMER compares up to {MAX_RESIDUES:,}"
    return ""


def record_name(record: bytes) -> str:
    """Return the name of a record as bytes after the ``>``; empty if it has none."""
    words = record.split(None, 1)
    return words[0].decode("utf-8", "replace") if record[:1].strip() and words else ""
