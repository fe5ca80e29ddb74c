"""What a scan of a training set's folders found, kept in a file: a set is scanned once, and by one process."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from fastfold.data.training.cache import parser_version
from fastfold.data.training.entry import Entry
from fastfold.data.training.packed.entries import EntryList, add_entries
from fastfold.data.training.packed.records import RecordFile, writing_records
from fastfold.errors import InputError, OutputError
from fastfold.utils.hashing import input_hash
from fastfold.utils.locks import held
from fastfold.utils.text_files import PathLike

_SCANNERS = (
    "fastfold.data.msa.database",
    "fastfold.data.training.complex_entry",
    "fastfold.data.training.dataset",
    "fastfold.data.training.entry",
    "fastfold.data.training.filters",
    "fastfold.data.training.index_tables",
    "fastfold.data.training.packed.entries",
    "fastfold.data.training.packed.index",
    "fastfold.data.training.packed.records",
    "fastfold.data.training.sampling",
)
"""Modules that decide, together with the parsers, what a scan finds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scanned:
    """What a scan found.

    Attributes:
        sets: Entries by the name of their set.
        meta: What else there is to say, in JSON's types.
    """

    sets: Mapping[str, Sequence[Entry]]
    meta: Mapping[str, Any]


def indexed(
    folder: PathLike, settings: Any, sources: Iterable[PathLike], scan: Callable[[], Scanned]
) -> Scanned:
    """What a scan finds, from a file of the folder if it has been made with the same settings of the same sources.

    One process scans, the others wait for it. A file that is damaged is made again; where none can be written, every
    process scans for itself.

    Args:
        folder: Where the files are kept; made if it does not exist.
        settings: All that the scan depends on (:func:`fastfold.utils.hashing.input_hash`).
        sources: Tables and folders that it reads; one that has changed, by its time or its size, is read again. What
            changes within a structure file is noticed when that is drawn.
        scan: Scans.
    """
    key = input_hash(settings, scanner_version(), [_state(path) for path in sources])
    path = Path(folder) / f"{key[:32]}.index"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held(FileLock(path.with_suffix(".lock"))):
            if (found := _read(path)) is None:
                _write(path, scan())
                found = _read(path)
    except (OutputError, OSError) as error:
        _log.warning("the index of the training set cannot be kept: %s", error)
        return scan()
    assert found is not None, "an index that has just been written"
    return found


def _read(path: Path) -> Scanned | None:
    if not path.exists():
        return None
    try:
        file = RecordFile(path)
    except InputError as error:
        _log.warning("%s; it is made again", error)
        return None
    return Scanned({name: EntryList(file, name) for name in file.meta["sets"]}, file.meta["more"])


def _write(path: Path, found: Scanned) -> None:
    with writing_records(path) as writer:
        for name, entries in found.sets.items():
            add_entries(writer, name, entries)
        writer.set_meta({"sets": list(found.sets), "more": dict(found.meta)})


@functools.cache
def scanner_version() -> str:
    """Fingerprint of the code that decides what a scan finds."""
    digest = hashlib.sha256(parser_version().encode())
    for name in _SCANNERS:
        file = importlib.import_module(name).__file__
        assert file is not None, name
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _state(path: PathLike) -> tuple[str, int, int] | None:
    """A file or folder with its time and size; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return str(Path(path).absolute()), status.st_mtime_ns, status.st_size
