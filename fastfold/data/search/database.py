"""Sequence databases: names, checks of files, and digests of their contents."""

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

from fastfold.data.search.chunks import is_compressed, searchable_records
from fastfold.data.targets import safe_stem
from fastfold.errors import ConfigError, FastFoldError, InputError
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.hashing import file_digest
from fastfold.utils.text_files import PathLike, json_object_or_none

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
        """Return the size in bytes and the time of the last change in nanoseconds.

        Raises:
            InputError: The file was removed.
        """
        try:
            found = self.path.stat()
        except OSError as error:
            raise InputError(f"cannot be read any more: {error.strerror}", path=self.path) from None
        return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def parse_databases(texts: Sequence[PathLike]) -> list[SequenceDatabase]:
    """Return the requested databases.

    Args:
        texts: ``NAME=FILE``, or a file whose name identifies it: ``uniref90.fasta``, ``mgy_clusters_2022_05.fa`` and so
            on; other files are named by their stem.

    Raises:
        ConfigError: Two of them have the same name.
    """
    databases: dict[str, SequenceDatabase] = {}
    for given in texts:
        text = os.fspath(given)
        named = None if os.path.exists(text) else _NAMED.fullmatch(text)
        path = Path(named[2] if named else text)
        name = named[1] if named else _name_of(path)
        if name in databases:
            raise ConfigError(
                f"{databases[name].path} and {path} would both be named {name}; name one of them differently, for "
                f"example --db other={path}"
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
