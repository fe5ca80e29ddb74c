"""Packed sets of entries with the data of their samples, and indices of entries alone."""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.loading.loader import SampleLoader, retry_io
from fastfold.data.templates.hits import TemplateHit
from fastfold.data.training import cache_format
from fastfold.data.training.cache import code_fingerprint, module_files, parser_version
from fastfold.data.training.entry import Entry, EntryData
from fastfold.data.training.packed.records import (
    RecordFile,
    RecordWriter,
    Scanned,
    add_entries,
    scanned_of,
    write_scanned,
    writing_records,
)
from fastfold.data.training.templates import read_candidates
from fastfold.errors import ConfigError, InputError, OutputError
from fastfold.utils.hashing import input_hash
from fastfold.utils.locks import held
from fastfold.utils.text_files import PathLike

SAMPLES = "samples"  #: Name of the table of these records
_VERSION = f"records of layout {cache_format.LAYOUT_VERSION}"
_MAX_RECORD = 1 << 30
_LEVEL = 1
"""Compression level of zlib: alignments shrink to a quarter, and decompress faster than most disks read."""


def to_record(data: EntryData, hits: Mapping[str, Sequence[TemplateHit]]) -> bytes:
    """Serialise an entry's data with the hits of :func:`fastfold.data.training.templates.read_candidates`.

    Data of a predicted structure have all residues.
    """
    arrays = cache_format.data_arrays(data, hits)
    return zlib.compress(cache_format.to_bytes(arrays, _VERSION, ""), _LEVEL)


def of_record(record: bytes) -> EntryData:
    """Parse an entry's data with its template hits from a record.

    Raises:
        InputError: The record has another version, or is damaged.
    """
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(record, _MAX_RECORD)
        if unpacker.unconsumed_tail:
            raise cache_format.Unusable(f"it unpacks to more than {_MAX_RECORD >> 20} MiB")
        if not unpacker.eof:
            raise cache_format.Unusable("it is truncated")
        arrays = cache_format.from_bytes(content, _VERSION, "")
    except cache_format.OtherVersion:
        raise InputError("the packed set was built by another version of FastFold; build it again") from None
    except (cache_format.Unusable, zlib.error) as error:
        raise InputError(f"a record of the packed set cannot be read ({error}); build it again") from None
    return cache_format.data_of(arrays)


_SAID_EVERY = 1000


@dataclass(frozen=True)
class MakeRecord:
    """Maker of an entry's record; pickled for the loader's workers."""

    read: Callable[[Entry], Any]  #: Reads an entry with all its residues

    def __call__(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        """Return the record of ``entry``, ``record`` ``[bytes]`` uint8."""
        return retry_io(partial(self._make, entry))

    def _make(self, entry: Entry) -> dict[str, np.ndarray]:
        data: EntryData = self.read(entry)
        hits = {
            sequence: read_candidates(path, sequence)
            for sequence, path in entry.template_hits(data.chains).items()
        }
        return {"record": np.frombuffer(to_record(data, hits), np.uint8)}


def build(
    path: PathLike,
    sets: Mapping[str, Sequence[Entry]],
    make: MakeRecord,
    *,
    meta: Mapping[str, Any],
    workers: int = 0,
    say: Callable[[str], None] = print,
) -> list[tuple[str, str]]:
    """Build a packed set, and return names and reasons of invalid entries, which are left out.

    Raises:
        ConfigError: All entries of a set are invalid.
        WriteError: The file cannot be written.
    """
    failed: list[tuple[str, str]] = []
    number = 0
    with writing_records(path) as writer:
        for name, entries in sets.items():

            def of_set(line: str, name: str = name) -> None:
                say(f"{name}: {line}")

            kept, bad = _add_samples(writer, entries, make, number, workers, of_set)
            if entries and not kept:
                first, reason = bad[0]
                raise ConfigError(
                    f"none of {len(entries)} entries of {name} can be used; the first is {first}: {reason}"
                )
            add_entries(writer, name, kept)
            failed += bad
            number += len(kept)
        writer.set_meta({**meta, "sets": list(sets), "version": parser_version(), "failed": failed})
    return failed


def _add_samples(
    writer: RecordWriter,
    entries: Sequence[Entry],
    make: MakeRecord,
    first: int,
    workers: int,
    say: Callable[[str], None],
) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Write the records of a set; return its entries with record numbers, and failed ones."""
    kept: list[Entry] = []
    if not entries:
        return kept, []
    # The limit is one more than the number of entries, so that failures never stop the build.
    with SampleLoader(
        make, entries, workers=workers, prefetch=2 * workers, max_failures=len(entries) + 1
    ) as loader:
        for draw in loader:
            writer.add(SAMPLES, draw.sample["record"].tobytes())
            kept.append(replace(entries[draw.number], record=first + len(kept)))
            if len(kept) % _SAID_EVERY == 0:
                say(f"{len(kept):,} of {len(entries):,} entries")
        say(f"{len(kept):,} of {len(entries):,} entries are packed")
        return kept, loader.quarantined


_NAMES = """
    training.dataset training.entry training.index_tables training.packed.records training.packed.samples
    training.sampling
"""
_SCANNERS = tuple(f"fastfold.data.{name}" for name in _NAMES.split())
"""Modules that, together with the parsers, determine the result of a scan."""

_log = logging.getLogger(__name__)


def indexed(
    folder: PathLike, settings: Any, sources: Iterable[PathLike], scan: Callable[[], Scanned]
) -> Scanned:
    """Return the result of a scan, from an index file in a folder if it has the same settings and sources.

    The settings are everything that the scan depends on (:func:`fastfold.utils.hashing.input_hash`). The sources are
    tables and folders that it reads; a changed time or size causes a new scan. A change within a structure file is
    noticed when it is drawn. One process scans, and the others wait for it. A damaged file is made again. If no file
    can be written, every process scans.
    """
    key = input_hash(settings, scanner_version(), [_state(path) for path in sources])
    path = Path(folder) / f"{key[:32]}.index"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held(path.with_suffix(".lock")):
            if (scanned := _read_index(path)) is None:
                write_scanned(path, scan())
                scanned = _read_index(path)
    except (OutputError, OSError) as error:
        _log.warning("the index of the training set cannot be written: %s", error)
        return scan()
    assert scanned is not None, "the index was just written"
    return scanned


def _read_index(path: Path) -> Scanned | None:
    if not path.exists():
        return None
    try:
        return scanned_of(RecordFile(path))
    except InputError as error:
        _log.warning("%s; making it again", error)
        return None


@functools.cache
def scanner_version() -> str:
    """Return the fingerprint of the code that determines the result of a scan."""
    return code_fingerprint(parser_version(), module_files(_SCANNERS))


def _state(path: PathLike) -> tuple[str, int, int] | None:
    """Return a path with its time and size; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return str(Path(path).absolute()), status.st_mtime_ns, status.st_size
