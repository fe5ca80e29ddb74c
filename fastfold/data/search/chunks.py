"""Cutting a FASTA database into parts for several workers, without reading it as a whole.

A file is thought of as chunks of equal length, of which each owns the records whose ``>`` lies in it. Chunks are dealt
out in turn, so that relatives, which often stand together in a database, do not all fall to one worker. Of a plain file
a worker reads its chunks itself. A compressed file is unpacked once, here, and its text handed out.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fastfold.errors import InputError
from fastfold.utils.text_files import GZIP_MAGIC

CHUNK_BYTES = 1 << 18
_PIECE = 1 << 16


class Part(NamedTuple):
    """What one worker searches at a time.

    Attributes:
        number: Place among the parts of the database, from zero.
        path: The database.
        chunks: First and last (exclusive) byte of each of its chunks, for a plain file.
        text: Its records, for a compressed file; None for a plain one, and once a worker has them.
        num_bytes: Bytes of the file that it stands for.
    """

    number: int
    path: Path
    chunks: tuple[tuple[int, int], ...]
    text: bytes | None
    num_bytes: int

    def read(self) -> bytes:
        """The records of the part.

        Raises:
            OSError: The file cannot be read, or the worker that had the text of a compressed file was lost.
        """
        if self.text is not None:
            return self.text
        if not self.chunks:
            raise OSError("a worker process was lost; search again, what was finished is kept")
        with self.path.open("rb") as file:
            return b"".join(_records(file, start, end) for start, end in self.chunks)


def is_compressed(path: Path) -> bool:
    """Whether a file is a gzip, whatever its name.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


def split_database(
    path: Path, workers: int, part_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[list[Part]]:
    """Cut a database into rounds of one part per worker.

    Args:
        path: The database, plain or compressed.
        workers: Parts per round.
        part_bytes: Length of a part; that of the last round is shorter.
        chunk_bytes: Length of a chunk.

    Yields:
        The parts of a round; one may be empty.

    Raises:
        InputError: A compressed file is damaged.
        OSError: The file cannot be read.
    """
    chunks = max(1, part_bytes // chunk_bytes) * workers
    rounds = _packed_rounds(path, chunks, chunk_bytes) if is_compressed(path) else None
    size = os.path.getsize(path)
    if rounds is None:
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
        return
    for number, (texts, num_bytes) in enumerate(rounds):
        share = num_bytes // workers
        yield [
            Part(number * workers + worker, path, (), b"".join(texts[worker::workers]), share)
            for worker in range(workers)
        ]


def _records(file: BinaryIO, start: int, end: int) -> bytes:
    """The records of a plain file whose ``>`` lies between two bytes."""
    begin = 0 if start == 0 else _next_record(file, start)
    if begin is None or begin >= end:
        return b""
    stop = _next_record(file, end)
    file.seek(begin)
    return file.read(-1 if stop is None else stop - begin)


def _next_record(file: BinaryIO, offset: int) -> int | None:
    """Place of the first ``>`` at the beginning of a line from ``offset`` (at least one) on; None if there is none."""
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
    """The texts of so many chunks at a time of a compressed file, and how many of its bytes they take."""
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
    """The records of each chunk of a compressed file."""
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            held, place, end = b"", 0, chunk_bytes  # ``held`` begins at byte ``place`` of the unpacked file
            finished = False
            while not finished:
                piece = file.read(chunk_bytes)
                finished = not piece
                held += piece
                while True:
                    found = held.find(b"\n>", max(0, end - 1 - place))
                    if found < 0:
                        break
                    yield held[: found + 1]
                    held, place, end = held[found + 1 :], place + found + 1, end + chunk_bytes
            if held:
                yield held
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"is a damaged gzip file ({error}); download or copy it again", path=path) from None
