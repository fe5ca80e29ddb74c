"""Index of a training set: the result of a scan of its folders, kept in a file."""

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
from fastfold.data.training.packed.records import EntryList, RecordFile, add_entries, writing_records
from fastfold.errors import InputError, OutputError
from fastfold.utils.hashing import input_hash
from fastfold.utils.locks import held
from fastfold.utils.text_files import PathLike

_NAMES = """
    training.dataset training.entry training.index_tables training.packed.index training.packed.records
    training.sampling
"""
_SCANNERS = tuple(f"fastfold.data.{name}" for name in _NAMES.split())
"""Modules that, together with the parsers, determine the result of a scan."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scanned:
    """Result of a scan."""

    sets: Mapping[str, Sequence[Entry]]  #: Entries by the name of their set
    meta: Mapping[str, Any]  #: Further data in JSON's types


def indexed(
    folder: PathLike, settings: Any, sources: Iterable[PathLike], scan: Callable[[], Scanned]
) -> Scanned:
    """Return the result of a scan, from an index file if it has the same settings and sources.

    One process scans, and the others wait for it. A damaged file is made again. If no file can be written, every
    process scans.

    Args:
        folder: Folder of the index files; created if missing.
        settings: Everything that the scan depends on (:func:`fastfold.utils.hashing.input_hash`).
        sources: Tables and folders that it reads; a changed time or size causes a new scan. A change within a structure
            file is noticed when it is drawn.
        scan: Scans.
    """
    key = input_hash(settings, scanner_version(), [_state(path) for path in sources])
    path = Path(folder) / f"{key[:32]}.index"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held(FileLock(path.with_suffix(".lock"))):
            if (found := _read_index(path)) is None:
                _write_index(path, scan())
                found = _read_index(path)
    except (OutputError, OSError) as error:
        _log.warning("the index of the training set cannot be written: %s", error)
        return scan()
    assert found is not None, "the index was just written"
    return found


def _read_index(path: Path) -> Scanned | None:
    if not path.exists():
        return None
    try:
        file = RecordFile(path)
    except InputError as error:
        _log.warning("%s; making it again", error)
        return None
    return Scanned({name: EntryList(file, name) for name in file.meta["sets"]}, file.meta["more"])


def _write_index(path: Path, found: Scanned) -> None:
    with writing_records(path) as writer:
        for name, entries in found.sets.items():
            add_entries(writer, name, entries)
        writer.set_meta({"sets": list(found.sets), "more": dict(found.meta)})


@functools.cache
def scanner_version() -> str:
    """Return the fingerprint of the code that determines the result of a scan."""
    digest = hashlib.sha256(parser_version().encode())
    for name in _SCANNERS:
        file = importlib.import_module(name).__file__
        assert file is not None, name
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _state(path: PathLike) -> tuple[str, int, int] | None:
    """Return a path with its time and size; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return str(Path(path).absolute()), status.st_mtime_ns, status.st_size
