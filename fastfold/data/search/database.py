"""Sequence databases: how they are named, whether a file can be one, and by what its contents are known."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.data.search.chunks import is_compressed
from fastfold.data.search.protein_records import searchable_records
from fastfold.data.targets import safe_stem
from fastfold.errors import ConfigError, FastFoldError, InputError
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.hashing import file_digest
from fastfold.utils.text_files import PathLike

PAIRING = "uniprot"
"""Name of the database whose hits serve to pair the chains of complexes by species."""

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", re.DOTALL)
# How the files of AlphaFold's databases begin, and what it calls the searches in them.
_KNOWN = {
    "uniref90": "uniref90",
    "uniref100": "uniref100",
    "uniref50": "uniref50",
    "uniref30": "uniref30",
    "uniclust30": "uniclust30",
    "mgnify": "mgnify",
    "mgy_clusters": "mgnify",
    "bfd-first_non_consensus_sequences": "small_bfd",
    "small_bfd": "small_bfd",
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
    """A FASTA file to search in.

    Attributes:
        name: What its hits are called: ``uniref90`` for ``uniref90_hits.sto``.
        path: The file, plain or compressed with gzip.
    """

    name: str
    path: Path

    def check(self) -> None:
        """Look at the beginning of the file, before hours are spent on the rest.

        Raises:
            InputError: The file is missing, unreadable, empty, damaged, not FASTA, or holds nucleotides.
        """
        try:
            if self.path.is_dir():
                raise InputError("is a folder; name the FASTA file in it", path=self.path)
            packed = is_compressed(self.path)
            with gzip.open(self.path) if packed else self.path.open("rb") as file:
                sample = file.read(_SAMPLE)
        except FileNotFoundError:
            raise InputError("no such database; check the name given with --db", path=self.path) from None
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
        """Size in bytes and time of the last change in nanoseconds.

        Raises:
            InputError: The file is gone.
        """
        try:
            found = self.path.stat()
        except OSError as error:
            raise InputError(f"cannot be read any more: {error.strerror}", path=self.path) from None
        return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def parse_databases(texts: Sequence[PathLike]) -> list[SequenceDatabase]:
    """The databases that were asked for.

    Args:
        texts: ``NAME=FILE``, or a file whose name tells what it is: ``uniref90.fasta``, ``mgy_clusters_2022_05.fa`` and
            so on; of any other file its stem is the name.

    Raises:
        ConfigError: Two of them have one name.
    """
    databases: dict[str, SequenceDatabase] = {}
    for given in texts:
        text = os.fspath(given)
        named = None if os.path.exists(text) else _NAMED.fullmatch(text)
        path = Path(named[2] if named else text)
        name = named[1] if named else _name_of(path)
        if name in databases:
            raise ConfigError(
                f"{databases[name].path} and {path} would both be called {name}; name one of them otherwise, for "
                f"example --db other={path}"
            )
        databases[name] = SequenceDatabase(name, path)
    return list(databases.values())


def content_digest(database: SequenceDatabase, memory: Path) -> str:
    """SHA-256 of a database, computed once for each state of its file.

    Args:
        database: The database.
        memory: Folder where the digests are remembered.

    Raises:
        InputError: The database cannot be read.
        WriteError: The digest cannot be written down.
    """
    file = memory / "databases.json"
    place, state = os.path.realpath(database.path), database.state()
    known = _read(file)
    entry = known.get(place)
    if isinstance(entry, dict) and {key: entry.get(key) for key in state} == state:
        return str(entry["sha256"])
    if state["size"] >= _LARGE:
        _log.warning(
            "%s: %.0f GB are read to know the database by its SHA-256, once for this state of the file",
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
    write_atomic(file, json.dumps({**_read(file), place: {**state, "sha256": digest}}, indent=1) + "\n")
    return digest


def changed(database: SequenceDatabase) -> FastFoldError:
    """The error of a database that was written to while it was searched."""
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


def _read(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _check_sample(sample: bytes, path: Path) -> None:
    """Raises :class:`InputError` if a file does not begin like a FASTA file of proteins."""
    text = sample.lstrip()
    if not text:
        raise InputError("is empty; a database has a line '>name' and a sequence for each protein", path=path)
    if not text.startswith(b">"):
        raise InputError(
            "is not FASTA: it does not begin with '>'; a database of another format has to be converted, a compressed "
            "one unpacked (gzip excepted)",
            path=path,
        )
    proteins, skipped = searchable_records(text)
    if skipped.others and proteins:
        text = proteins
    letters = [
        letter
        for line in text.splitlines()
        if not line.startswith(b">")
        for letter in line
        if letter in _LETTERS
    ]
    if not letters:
        raise InputError("holds names without sequences; it cannot be searched", path=path)
    if len(letters) >= 100 and sum(letter in _NUCLEOTIDES for letter in letters) > 0.95 * len(letters):
        raise InputError(
            "holds nucleotides; a database of proteins is needed (translate it first)", path=path
        )
