"""A folder that remembers parsed structures and alignments, so that each file is parsed once.

An entry's file is named after a hash of the bytes that it was made from, so that a changed source is another
entry. It holds the version of the parsers too: a fingerprint of their code, so that no old entry survives a
change of theirs. Entries are npz files without pickles, whose checksums tell damage. They are written beside
their place and renamed: two writers of one entry write the same, and a killed one leaves nothing but a
temporary file, which is removed later. A cache that cannot be written costs time, never a sample.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.alignment import Msa
from fastfold.data.chain_structure import ChainStructure
from fastfold.data.targets import safe_stem
from fastfold.data.text_files import PathLike
from fastfold.data.training_entry import Entry, EntryData, read_entry
from fastfold.errors import OutputError

_LAYOUT_VERSION = 1  # of the arrays below
_TEMPORARY = "temporary"
_STALE_S = 3600.0
_PARSERS = (
    "structure_*.py",
    "chain_structure.py",
    "alignment.py",
    "stockholm.py",
    "fasta.py",
    "targets.py",
    "msa_folder.py",
    "text_files.py",
    "training_entry.py",
    "feature_cache.py",
    "../protein/residue_constants.*",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheReport:
    """Size of a cache: number of entries, and their bytes."""

    entries: int
    size: int

    def __str__(self) -> str:
        return f"{self.entries} chains in {self.size / 1e6:.1f} MB"


class _Unusable(Exception):
    """An entry that has to be made again."""


class _OtherVersion(_Unusable):
    pass


class FeatureCache:
    """Reads entries through a cache folder; safe with any number of processes, and picklable.

    Args:
        directory: The folder; made if it does not exist.
        version: Of the parsers; their fingerprint by default.

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
        """What :func:`fastfold.data.training_entry.read_entry` returns, from the cache where it is there.

        Raises:
            InputError: The entry has to be read and cannot be.
        """
        sources = (entry.structure, *entry.alignments())
        digest = _digest(sources, entry.chain_id)
        path = self.directory / digest[:2] / f"{safe_stem(entry.id)}-{digest[:32]}.npz"
        data = self._load(path, digest)
        if data is None:
            self.misses += 1
            data = read_entry(replace(entry, resolution=None))
            if digest == _digest(sources, entry.chain_id):  # else a source changed while it was read
                self._save(path, _pack(data, self.version, digest))
        else:
            self.hits += 1
        return data if entry.resolution is None else replace(data, resolution=entry.resolution)

    def report(self) -> CacheReport:
        """Counts what is in the folder."""
        sizes = [path.stat().st_size for path in self.directory.glob("??/*.npz")]
        return CacheReport(len(sizes), sum(sizes))

    def _load(self, path: Path, digest: str) -> EntryData | None:
        """The entry; None where it is not there or has to be made again."""
        try:
            return _unpack(path.read_bytes(), self.version, digest)
        except FileNotFoundError:
            return None
        except _OtherVersion:
            # Which of many processes says so is decided by who makes this file.
            with contextlib.suppress(OSError):
                (self.directory / _TEMPORARY / f"told-{self.version}").touch(exist_ok=False)
                _log.warning(
                    "the cache %s was written by another version; its entries are made again", self.directory
                )
        except (OSError, _Unusable) as error:
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
    folder = Path(__file__).parent
    digest = hashlib.sha256(str(_LAYOUT_VERSION).encode())
    for pattern in _PARSERS:
        base, _, name = pattern.rpartition("/")
        for path in sorted((folder / base).glob(name)):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(sources: tuple[Path, ...], chain_id: str | None) -> str:
    """Hash of the content and the kinds of files, and of the chain that is read from them."""
    digest = hashlib.sha256(repr((chain_id, [path.suffixes[-2:] for path in sources])).encode())
    for path in sources:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""  # parsing it gives an error with all that there is to say
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


def _pack(data: EntryData, version: str, digest: str) -> bytes:
    """Bytes of an npz file; atoms that are not there and columns without deletions take no space."""
    chain = data.chain
    observed = chain.mask > 0
    arrays: dict[str, Any] = {
        "version": np.array([version, digest]),
        "chain_id": _text(chain.chain_id),
        "sequence": _text(chain.sequence),
        "residue_index": chain.residue_index,
        "observed": np.packbits(observed),
        "positions": chain.positions[observed],
        "b_factors": chain.b_factors[observed],
        "resolution": np.array([] if data.resolution is None else [data.resolution], np.float64),
        "alignments": np.array(len(data.alignments)),
    }
    for i, msa in enumerate(data.alignments):
        where = np.flatnonzero(msa.deletions)
        arrays |= {
            f"rows{i}": _text("".join(msa.sequences)),
            f"deleted{i}": np.stack([where, msa.deletions.reshape(-1)[where].astype(np.int64)]),
            f"descriptions{i}": _text("\n".join(msa.descriptions)),
        }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpack(content: bytes, version: str, digest: str) -> EntryData:
    """The inverse of :func:`_pack`."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if file["version"][0] != version:
                raise _OtherVersion
            arrays = dict(file)
        if arrays["version"][1] != digest:
            raise _Unusable("it is that of another chain")
        return _restore(arrays)
    except _Unusable:
        raise
    except Exception as error:  # whatever damage makes the zip and npy readers raise
        raise _Unusable(f"{type(error).__name__}: {error}") from None


def _restore(arrays: dict[str, np.ndarray]) -> EntryData:
    sequence = _string(arrays["sequence"])
    length = len(sequence)
    observed = np.unpackbits(arrays["observed"], count=length * 37).reshape(length, 37).astype(bool)
    positions = np.zeros((length, 37, 3), np.float32)
    positions[observed] = arrays["positions"]
    b_factors = np.zeros((length, 37), np.float32)
    b_factors[observed] = arrays["b_factors"]
    chain = ChainStructure(
        chain_id=_string(arrays["chain_id"]),
        sequence=sequence,
        positions=positions,
        mask=observed.astype(np.float32),
        residue_index=arrays["residue_index"],
        b_factors=b_factors,
    )
    alignments = []
    for i in range(int(arrays["alignments"])):
        rows = _string(arrays[f"rows{i}"])
        sequences = tuple(rows[start : start + length] for start in range(0, len(rows), length))
        deletions = np.zeros(len(rows), np.int32)
        where, number = arrays[f"deleted{i}"]
        deletions[where] = number
        descriptions = tuple(_string(arrays[f"descriptions{i}"]).split("\n"))
        alignments.append(Msa(sequences, deletions.reshape(-1, length), descriptions))
    resolution = arrays["resolution"]
    return EntryData(chain, tuple(alignments), float(resolution[0]) if len(resolution) else None)


def _text(value: str) -> np.ndarray:
    return np.frombuffer(value.encode("utf-8"), np.uint8)


def _string(value: np.ndarray) -> str:
    return value.tobytes().decode("utf-8")
