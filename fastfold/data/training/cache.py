"""A folder that remembers parsed structures and alignments, so that each file is parsed once.

An entry's file is named after a hash of the bytes that it was made from, so that a changed source is another
entry. It holds the version of the parsers too: a fingerprint of their code, so that no old entry survives a
change of theirs. Entries (:mod:`fastfold.data.training.cache_format`) are written next to their place and renamed: two
writers of one entry write the same, and a killed one leaves nothing but a temporary file, which is removed
later. A cache that cannot be written costs time, never a sample.

A chain's entry holds its structure and its alignments. Of complexes the structure file and each alignment have
entries of their own, since which alignments there are is only known once the structure has been read.
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
from collections.abc import Callable
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
from fastfold.data.training.complex_entry import ComplexData, ComplexEntry, read_complex
from fastfold.data.training.entry import Entry, EntryData, read_chain_msa, read_entry
from fastfold.data.training.templates import read_candidates
from fastfold.errors import OutputError
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import Structure
from fastfold.utils.text_files import PathLike

_TEMPORARY = "temporary"
_STALE_S = 3600.0
_PARSERS = (
    "fastfold.protein.io.read",
    "fastfold.protein.io.cif_tables",
    "fastfold.protein.io.mmcif_reader",
    "fastfold.protein.io.pdb_reader",
    "fastfold.protein.io.pdb_columns",
    "fastfold.protein.io.records",
    "fastfold.protein.io.residue_names",
    "fastfold.protein.io.chains",
    "fastfold.protein.io.altlocs",
    "fastfold.protein.io.align_to_seqres",
    "fastfold.protein.structure",
    "fastfold.protein.residue_constants",
    "fastfold.data.features.coevolution",
    "fastfold.data.features.raw",
    "fastfold.data.features.transforms",
    "fastfold.data.msa.msa",
    "fastfold.data.msa.stockholm",
    "fastfold.data.templates.hhr",
    "fastfold.data.templates.hits",
    "fastfold.data.templates.hmmsearch_hits",
    "fastfold.data.templates.prefilter",
    "fastfold.data.templates.select",
    "fastfold.data.templates.source",
    "fastfold.data.fasta",
    "fastfold.data.targets",
    "fastfold.data.msa.find",
    "fastfold.utils.text_files",
    "fastfold.data.training.entry",
    "fastfold.data.training.cache",
    "fastfold.data.training.cache_format",
    "fastfold.data.training.templates",
)
"""Modules that decide what a parsed file looks like."""
_TABLES = ("residue_constants.json",)
"""Tables of :mod:`fastfold.protein` that they read."""

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
    """Reads entries through a cache folder; safe with any number of processes, and picklable.

    Args:
        directory: The folder; made if it does not exist.
        version: Version of the parsers; their fingerprint by default.

    Attributes:
        hits: Entries that this object has found.
        misses: Entries that it had to make.

    Raises:
        OutputError: The folder cannot be made.
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
        """What :func:`fastfold.data.training.entry.read_entry` returns, from the cache where it is there.

        Raises:
            InputError: The entry has to be read and cannot be.
        """
        data = self._cached(
            entry.id,
            (entry.structure, *entry.alignments()),
            entry.chain_id,
            make=lambda: read_entry(replace(entry, resolution=None, release_date="")),
            pack=_entry_arrays,
            unpack=_entry_of,
        )
        if entry.resolution is not None:
            data = replace(data, resolution=entry.resolution)
        return replace(data, release_date=entry.release_date) if entry.release_date else data

    def template_hits(self, path: AlignmentFile, query: str) -> list[TemplateHit]:
        """As :func:`fastfold.data.training.templates.read_candidates`, from the cache where they are there.

        Raises:
            InputError: The hits have to be read and cannot be.
        """
        return self._cached(
            path.name,
            (path,),
            ("template hits of", query),
            make=lambda: read_candidates(path, query),
            pack=cache_format.hits_arrays,
            unpack=cache_format.hits_of,
        )

    def coevolution(self, entry: Entry, subset: int, analyse: Callable[[], Coevolution]) -> Coevolution:
        """The coevolution of a subset of an entry's alignment, from the cache where it is there.

        Args:
            entry: The chain.
            subset: Number of the subset.
            analyse: Computes it.
        """
        return self._cached(
            entry.id,
            (entry.structure, *entry.alignments()),
            ("coevolution", entry.chain_id, subset),
            make=analyse,
            pack=cache_format.coevolution_arrays,
            unpack=cache_format.coevolution_of,
        )

    def read_complex(self, entry: ComplexEntry) -> ComplexData:
        """As :func:`fastfold.data.training.complex_entry.read_complex`, its files from the cache where they are there.

        Raises:
            InputError: A file has to be read and cannot be.
        """
        return read_complex(entry, structure_reader=self._structure, msa_reader=self._msa)

    def _structure(self, path: Path) -> Structure:
        """All chains of a file, its resolution and its date; nothing else of it is remembered."""
        return self._cached(
            path.name,
            (path,),
            ("all chains",),
            make=lambda: read_structure(path),
            pack=_structure_arrays,
            unpack=lambda arrays: _structure_of(arrays, path.name),
        )

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
        """What is made of files, from the cache where it is there.

        Args:
            name: The entry's; serves people alone.
            sources: The files.
            asked: What is asked of them, told apart by its ``repr``.
            make: Makes it.
            pack: Turns it into arrays.
            unpack: The inverse.
        """
        digest = _digest(sources, asked)
        path = self.directory / digest[:2] / f"{safe_stem(name)}-{digest[:32]}.npz"
        arrays = self._load(path, digest)
        if arrays is not None:
            self.hits += 1
            return unpack(arrays)
        self.misses += 1
        made = make()
        if digest == _digest(sources, asked):  # else a source changed while it was read
            self._save(path, cache_format.to_bytes(pack(made), self.version, digest))
        return made

    def report(self) -> CacheReport:
        """Counts what is in the folder."""
        sizes = [path.stat().st_size for path in self.directory.glob("??/*.npz")]
        return CacheReport(len(sizes), sum(sizes))

    def _load(self, path: Path, digest: str) -> Arrays | None:
        """An entry's arrays; None where it is not there or has to be made again."""
        try:
            return cache_format.from_bytes(path.read_bytes(), self.version, digest)
        except FileNotFoundError:
            return None
        except cache_format.OtherVersion:
            # Which of many processes says so is decided by who makes this file.
            with contextlib.suppress(OSError):
                (self.directory / _TEMPORARY / f"told-{self.version}").touch(exist_ok=False)
                _log.warning(
                    "the cache %s was written by another version; its entries are made again", self.directory
                )
        except (OSError, cache_format.Unusable) as error:
            _log.warning("the cache entry %s cannot be read (%s) and is made again", path, error)
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
                    "the cache %s cannot be written (%s); what is missing there is parsed each time",
                    self.directory,
                    error.strerror or error,
                )

    def _remove_stale(self) -> None:
        """Removes what killed writers left; writing takes seconds, so that an hour is safe."""
        for path in (self.directory / _TEMPORARY).iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()


@functools.cache
def parser_version() -> str:
    """Fingerprint of the code and tables that decide what a parsed file looks like."""
    digest = hashlib.sha256(str(cache_format.LAYOUT_VERSION).encode())
    for path in _parser_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _parser_files() -> list[Path]:
    """Sources of the parsers, and the tables that they read; a module or a table that is missing is an error."""
    found = [importlib.import_module(name).__file__ for name in _PARSERS]
    tables = [str(resources.files("fastfold.protein").joinpath(name)) for name in _TABLES]
    paths = [Path(file) for file in (*found, *tables) if file is not None]
    assert len(paths) == len(_PARSERS) + len(_TABLES), "a parser has no source"
    return paths


def _digest(sources: tuple[AlignmentFile, ...], asked: object) -> str:
    """Hash of the content and the kinds of files, and of what is read from them."""
    digest = hashlib.sha256(repr((asked, [path.suffixes[-2:] for path in sources])).encode())
    for path in sources:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""  # parsing it gives an error with all that there is to say
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


def _entry_arrays(data: EntryData) -> Arrays:
    return {
        **cache_format.chain_arrays(data.chain),
        "resolution": cache_format.optional(data.resolution),
        "release_date": cache_format.text_array(data.release_date),
        **cache_format.many("alignments", [cache_format.msa_arrays(msa) for msa in data.alignments]),
    }


def _entry_of(arrays: Arrays) -> EntryData:
    return EntryData(
        chain=cache_format.chain_of(arrays),
        alignments=tuple(cache_format.msa_of(part) for part in cache_format.parts_of("alignments", arrays)),
        resolution=cache_format.number_or_none(arrays["resolution"]),
        release_date=cache_format.string_of(arrays["release_date"]),
    )


def _structure_arrays(structure: Structure) -> Arrays:
    return {
        "resolution": cache_format.optional(structure.resolution),
        "release_date": cache_format.text_array(structure.release_date),
        **cache_format.many("chains", [cache_format.chain_arrays(chain) for chain in structure.chains]),
    }


def _structure_of(arrays: Arrays, name: str) -> Structure:
    return Structure(
        name=name,
        chains=tuple(cache_format.chain_of(part) for part in cache_format.parts_of("chains", arrays)),
        resolution=cache_format.number_or_none(arrays["resolution"]),
        release_date=cache_format.string_of(arrays["release_date"]),
    )
