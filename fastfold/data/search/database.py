"""Sequence databases: names, checks of files, digests of their contents, parts for workers, and filters of records.

A file is split without reading it as a whole. It is divided into chunks of equal length; each owns the records whose
``>`` is in it. Chunks are distributed round-robin, because relatives are often adjacent in a database and should not
all go to one worker. A worker reads its chunks of a plain file itself. A compressed file is decompressed once, here,
and its text is distributed.

``pdb_seqres.txt`` also contains nucleic acids (``mol:na``), some with letters that are not residues, at which HMMER
stops.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fastfold.data.targets import safe_stem
from fastfold.errors import ConfigError, FastFoldError, InputError
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.foreign_text import json_object_or_none
from fastfold.utils.hashing import file_digest
from fastfold.utils.text_files import GZIP_MAGIC, PathLike

CHUNK_BYTES = 1 << 18
_PIECE = 1 << 16


class DatabasePart(NamedTuple):
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


def _is_compressed(path: Path) -> bool:
    """Return True for a gzip file with any name."""
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


def split_database(
    path: Path, workers: int, part_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[list[DatabasePart]]:
    """Split a database into rounds of one part per worker; a part may be empty.

    Raises:
        InputError: A compressed file is damaged.
        OSError: The file cannot be read.
    """
    chunks = max(1, part_bytes // chunk_bytes) * workers
    if _is_compressed(path):
        for number, (texts, num_bytes) in enumerate(_packed_rounds(path, chunks, chunk_bytes)):
            share = num_bytes // workers
            yield [
                DatabasePart(number * workers + worker, path, (), b"".join(texts[worker::workers]), share)
                for worker in range(workers)
            ]
        return
    size = os.path.getsize(path)
    starts = range(0, size, chunk_bytes)
    for number, first in enumerate(range(0, len(starts), chunks)):
        ranges = [(start, min(start + chunk_bytes, size)) for start in starts[first : first + chunks]]
        dealt = [tuple(ranges[worker::workers]) for worker in range(workers)]
        yield [
            DatabasePart(
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
        place_in_text = (kept + piece).find(b"\n>")
        if place_in_text >= 0:
            return place - len(kept) + place_in_text + 1
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
                while (break_at := held.find(b"\n>", max(0, end - 1 - place))) >= 0:
                    yield held[: break_at + 1]
                    held, place, end = held[break_at + 1 :], place + break_at + 1, end + chunk_bytes
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


PAIRING = "uniprot"  #: Name of the database whose hits pair the chains of complexes by species

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", re.DOTALL)
# Beginnings of the file names of AlphaFold's databases, with AlphaFold's names of the searches.
_OWN_NAMES = ("uniref90", "uniref100", "uniref50", "uniref30", "uniclust30", "mgnify", "small_bfd")
_KNOWN = {
    **{name: name for name in _OWN_NAMES},
    "mgy_clusters": "mgnify",
    "bfd-first_non_consensus_sequences": "small_bfd",
    "bfd": "bfd",
    "uniprot": PAIRING,
}
_SAMPLE = 1 << 20
_LARGE = 1 << 31
_NUCLEOTIDES = frozenset(b"ACGTUNacgtun")
_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SequenceDatabase:
    """FASTA file to search."""

    name: str  #: Name of its hits: ``uniref90`` for ``uniref90_hits.sto``
    path: Path  #: Path of the file, plain or gzipped

    def check(self) -> None:
        """Check the beginning of the file before a long search.

        Raises:
            InputError: The file is missing, unreadable, empty, damaged, not FASTA, or holds nucleotides.
        """
        try:
            if self.path.is_dir():
                raise InputError("is a folder; name the FASTA file in it", path=self.path)
            packed = _is_compressed(self.path)
            with gzip.open(self.path) if packed else self.path.open("rb") as file:
                sample = file.read(_SAMPLE)
        except FileNotFoundError:
            raise InputError(
                "no such database; check the name given with `SearchSources.databases`", path=self.path
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"is a damaged gzip file ({error}); download or copy it again", path=self.path
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot be read: {getattr(error, 'strerror', None) or error}", path=self.path
            ) from None
        _check_sample(sample, self.path)

    def state(self) -> dict[str, int]:
        """Return the size in bytes and the time of the last change in nanoseconds.

        Raises:
            InputError: The file was removed.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise InputError(f"cannot be read any more: {error.strerror}", path=self.path) from None
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def parse_databases(texts: Sequence[PathLike]) -> list[SequenceDatabase]:
    """Return the requested databases: ``NAME=FILE``, or a file whose name identifies it.

    Such names are ``uniref90.fasta``, ``mgy_clusters_2022_05.fa`` and so on; other files are named by their stem.

    Raises:
        ConfigError: Two of them have the same name.
    """
    databases: dict[str, SequenceDatabase] = {}
    for source in texts:
        text = os.fspath(source)
        named = None if os.path.exists(text) else _NAMED.fullmatch(text)
        path = Path(named[2] if named else text)
        name = named[1] if named else _name_of(path)
        if name in databases:
            raise ConfigError(
                f"{databases[name].path} and {path} would both be named {name}; name one of them differently, for "
                f"example `SearchSources.databases=other={path}`"
            )
        databases[name] = SequenceDatabase(name, path)
    return list(databases.values())


def content_digest(database: SequenceDatabase, memory: Path) -> str:
    """Return the SHA-256 of a database, computed once for each state of its file.

    Raises:
        InputError: The database cannot be read.
        WriteError: The digest cannot be written.
    """
    file = memory / "databases.json"
    place, state = os.path.realpath(database.path), database.state()
    known = json_object_or_none(file) or {}
    entry = known.get(place)
    if isinstance(entry, dict) and {key: entry.get(key) for key in state} == state:
        return str(entry["sha256"])
    if state["size"] >= _LARGE:
        _log.warning(
            "%s: reading %.0f GB for the SHA-256 of the database, once for this state of the file",
            database.path,
            state["size"] / 1e9,
        )
    try:
        digest = file_digest(database.path)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=database.path) from None
    if database.state() != state:
        raise changed(database)
    memory.mkdir(parents=True, exist_ok=True)
    write_atomic(
        file,
        json.dumps({**(json_object_or_none(file) or {}), place: {**state, "sha256": digest}}, indent=1)
        + "\n",
    )
    return digest


def changed(database: SequenceDatabase) -> FastFoldError:
    """Return the error about a database that was changed during a search."""
    return InputError(
        "was changed while it was searched; search again when the file is complete", path=database.path
    )


def _name_of(path: Path) -> str:
    stem = path.name.lower()
    for beginning, name in _KNOWN.items():
        if stem.startswith(beginning):
            return name
    stem = path.name.removesuffix(".gz")
    return safe_stem(stem.rpartition(".")[0] or stem)


def _check_sample(sample: bytes, path: Path) -> None:
    text = sample.lstrip()
    if not text:
        raise InputError("is empty; a database has a line '>name' and a sequence for each protein", path=path)
    if not text.startswith(b">"):
        raise InputError(
            "is not FASTA: it does not begin with '>'; convert a database of another format, and decompress a "
            "compressed one (gzip excepted)",
            path=path,
        )
    proteins, skipped = searchable_records(text)
    if skipped.others and proteins:
        text = proteins
    residues = b"".join(line for line in text.splitlines() if not line.startswith(b">"))
    letters = [letter for letter in residues if letter in _LETTERS]
    if not letters:
        raise InputError("contains names without sequences; it cannot be searched", path=path)
    if len(letters) >= 100 and sum(letter in _NUCLEOTIDES for letter in letters) > 0.95 * len(letters):
        raise InputError(
            "contains nucleotides; a database of proteins is needed (translate it first)", path=path
        )
