"""Cache folder of parsed structures and alignments.

An entry's file is named after a hash of the bytes of its sources, so a changed source has another entry. It also
contains the version of the parsers, a fingerprint of their code, so that a change of the parsers invalidates entries.
Entries (:mod:`fastfold.data.training.cache_format`) are written atomically: two writers of one entry write the same,
and a killed one leaves only a temporary file, which is removed later. A cache that cannot be written costs time, but
never a sample.

A chain's entry contains its structure and its alignments. For complexes, the structure file and each alignment have
separate entries, because the alignments are only known after the structure is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TypeVar

from fastfold.data.features.coevolution import Coevolution
from fastfold.data.msa.find import AlignmentFile
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import safe_stem
from fastfold.data.templates.hits import TemplateHit
from fastfold.data.training import cache_format
from fastfold.data.training.cache_format import Arrays
from fastfold.data.training.entry import (
    ComplexEntry,
    ComplexMsas,
    Entry,
    EntryData,
    read_chain_msa,
    read_entry,
)
from fastfold.data.training.templates import read_candidates
from fastfold.errors import OutputError
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import Structure
from fastfold.utils.text_files import PathLike

_TEMPORARY = "temporary"
_STALE_S = 3600.0
_NAMES = """
    protein.io.read protein.io.cif_tables protein.io.mmcif_reader protein.io.pdb_reader protein.io.records
    protein.io.chains protein.structure protein.residue_constants data.features.coevolution
    data.features.raw data.features.transforms data.msa.msa data.msa.sampling data.msa.formats data.templates.hits
    data.templates.select data.templates.source
    data.targets data.msa.find utils.text_files utils.foreign_text data.training.entry data.training.cache
    data.training.cache_format data.training.templates
"""
_PARSERS = tuple(f"fastfold.{name}" for name in _NAMES.split())
"""Modules that determine the result of parsing a file."""
_TABLES = ("residue_constants.json",)  #: Tables of :mod:`fastfold.protein` that these modules read

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheReport:
    """Size of a cache: number of entries, and their bytes."""

    entries: int
    size: int

    def __str__(self) -> str:
        return f"{self.entries} entries in {self.size / 1e6:.1f} MB"


class FeatureCache:
    """Reader of entries through a cache folder; picklable and safe with any number of processes.

    ``hits`` and ``misses`` count entries that were found and made.

    Raises:
        OutputError: The folder cannot be created.
    """

    def __init__(self, directory: PathLike, *, version: str | None = None) -> None:
        self.directory = Path(directory)
        self.version = version or parser_version()
        self.hits = self.misses = 0
        self._warned = False
        try:
            (self.directory / _TEMPORARY).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make the cache folder {str(directory)!r}: {error.strerror or error}; choose another "
                "data.cache, or null for none"
            ) from None
        self._remove_stale()

    def read(self, entry: Entry) -> EntryData:
        """Return :func:`fastfold.data.training.entry.read_entry` of an entry, from the cache if present.

        Raises:
            InputError: The entry is not in the cache and invalid.
        """
        if isinstance(entry, ComplexEntry):
            return read_entry(entry, structure_reader=self._structure, msa_reader=self._msa)
        data = self._cached(
            entry.id,
            (entry.structure, *entry.alignments()),
            entry.chain_id,
            make=lambda: read_entry(replace(entry, resolution=None, release_date="")),
            pack=cache_format.data_arrays,
            unpack=cache_format.data_of,
        )
        if entry.resolution is not None:
            data = replace(data, resolution=entry.resolution)
        return replace(data, release_date=entry.release_date) if entry.release_date else data

    def template_hits(self, path: AlignmentFile, query: str) -> list[TemplateHit]:
        """Return :func:`fastfold.data.training.templates.read_candidates`, from the cache if present.

        Raises:
            InputError: The hits are not in the cache and invalid.
        """
        return self._cached(
            path.name,
            (path,),
            ("template hits of", query),
            make=lambda: read_candidates(path, query),
            pack=cache_format.hits_arrays,
            unpack=cache_format.hits_of,
        )

    def coevolution(self, entry: Entry, subset: int, analyze: Callable[[], Coevolution]) -> Coevolution:
        """Return the coevolution of a subset of an entry's alignment, from the cache if present."""
        return self._cached(
            entry.id,
            (entry.structure, *entry.alignments()),
            ("coevolution", entry.chain_id, subset),
            make=analyze,
            pack=cache_format.coevolution_arrays,
            unpack=cache_format.coevolution_of,
        )

    def _structure(self, path: Path) -> Structure:
        """Return all chains of a file, its resolution and its date; other data are not cached."""

        def read() -> EntryData:
            structure = read_structure(path)
            msas = (ComplexMsas(),) * len(structure.chains)
            return EntryData(structure.chains, msas, structure.resolution, structure.release_date)

        data = self._cached(
            path.name,
            (path,),
            ("all chains",),
            make=read,
            pack=cache_format.data_arrays,
            unpack=cache_format.data_of,
        )
        return Structure(path.name, data.chains, data.resolution, release_date=data.release_date)

    def _msa(self, path: AlignmentFile, sequence: str) -> Msa:
        return self._cached(
            path.name,
            (path,),
            ("alignment of", sequence),
            make=lambda: read_chain_msa(path, sequence),
            pack=cache_format.msa_arrays,
            unpack=cache_format.msa_of,
        )

    def _cached(
        self,
        name: str,
        sources: tuple[AlignmentFile, ...],
        asked: object,
        *,
        make: Callable[[], T],
        pack: Callable[[T], Arrays],
        unpack: Callable[[Arrays], T],
    ) -> T:
        """Return an object made from files, from the cache if present."""
        digest = _digest(sources, asked)
        path = self.directory / digest[:2] / f"{safe_stem(name)}-{digest[:32]}.npz"
        arrays = self._load(path, digest)
        if arrays is not None:
            self.hits += 1
            return unpack(arrays)
        self.misses += 1
        made = make()
        if digest == _digest(sources, asked):  # otherwise a source changed while it was read
            self._save(path, cache_format.to_bytes(pack(made), self.version, digest))
        return made

    def report(self) -> CacheReport:
        """Count the entries of the folder."""
        sizes = [path.stat().st_size for path in self.directory.glob("??/*.npz")]
        return CacheReport(len(sizes), sum(sizes))

    def _load(self, path: Path, digest: str) -> Arrays | None:
        """Load an entry's arrays; return None if it is missing or outdated."""
        try:
            return cache_format.from_bytes(path.read_bytes(), self.version, digest)
        except FileNotFoundError:
            return None
        except cache_format.OtherVersion:
            # The process that creates this file logs the change.
            with contextlib.suppress(OSError):
                (self.directory / _TEMPORARY / f"told-{self.version}").touch(exist_ok=False)
                _log.warning(
                    "the cache %s was written by another version; its entries are made again", self.directory
                )
        except (OSError, cache_format.Unusable) as error:
            _log.warning("the cache entry %s cannot be read (%s); it is made again", path, error)
        return None

    def _save(self, path: Path, data: bytes) -> None:
        temporary = self.directory / _TEMPORARY / secrets.token_hex(8)
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._warned:
                self._warned = True
                _log.warning(
                    "the cache %s cannot be written (%s); missing entries are parsed each time",
                    self.directory,
                    error.strerror or error,
                )

    def _remove_stale(self) -> None:
        """Remove files of killed writers; writing takes seconds, so those older than an hour are safe to remove."""
        for path in (self.directory / _TEMPORARY).iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()


@functools.cache
def parser_version() -> str:
    """Return the fingerprint of the code and tables that determine the result of parsing."""
    return code_fingerprint(str(cache_format.LAYOUT_VERSION), _parser_files())[:16]


def code_fingerprint(version: str, files: Sequence[Path]) -> str:
    """Return the SHA-256 of a version and of the names and contents of files, as 64 hexadecimal digits."""
    digest = hashlib.sha256(version.encode())
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def module_files(names: Sequence[str]) -> list[Path]:
    """Return the sources of modules; a missing one is an error."""
    return [Path(str(importlib.import_module(name).__file__)) for name in names]


def _parser_files() -> list[Path]:
    """Return the sources of the parsers and their tables."""
    tables = [Path(str(resources.files("fastfold.protein").joinpath(name))) for name in _TABLES]
    return module_files(_PARSERS) + tables


def _digest(sources: tuple[AlignmentFile, ...], asked: object) -> str:
    digest = hashlib.sha256(repr((asked, [path.suffixes[-2:] for path in sources])).encode())
    for path in sources:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""  # parsing it raises an error with all details
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()
