"""Download of AlphaFold's databases into one folder, resumable and verified.

A packed file is downloaded to a name that ends in ``.partial``, from which a later run resumes if the source is
unchanged. It is checked, unpacked next to its place, moved there when it is whole, and removed. ``record.json`` in a
database's folder records the source and the SHA-256 of each unpacked file.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.data.databases.published import MMCIF_FOLDER, MMCIF_SOURCE, PublishedDatabase
from fastfold.errors import ConfigError, InputError, NetworkError, WriteError
from fastfold.utils.atomic_files import output_error, prepare_output_directory, write_atomic
from fastfold.utils.download.answers import Retries, Say, tell_nobody
from fastfold.utils.download.http import check_url
from fastfold.utils.download.pieces import Piece, Progress, Readable, fetch_piece, local_piece, remote_piece
from fastfold.utils.download.remote_file import RemoteFile
from fastfold.utils.download.tar_members import GZIP_EXPANSION, TarMemberError, read_piecewise, tar_members
from fastfold.utils.foreign_text import json_object_or_none
from fastfold.utils.hashing import file_digest
from fastfold.utils.locks import alone

RECORD = "record.json"

_BLOCK = 1 << 20
_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_DAMAGED = (TarMemberError, gzip.BadGzipFile, zlib.error, EOFError)


@dataclass(frozen=True)
class DatabaseSize:
    """Size of a database before its download."""

    database: PublishedDatabase
    download: int | None  #: Bytes of the packed files by the server; None where it does not tell
    is_present: bool  #: True if the database is in the folder already

    @property
    def needed(self) -> float:
        """Bytes that the disk needs: packed files plus unpacked files, by AlphaFold's README."""
        if self.is_present:
            return 0.0
        download = 1e9 * self.database.download_gb if self.download is None else self.download
        if self.database.kind in ("rsync", "file"):
            return download
        return download + download * self.database.unpacked_gb / self.database.download_gb


def database_sizes(
    databases: Sequence[PublishedDatabase], folder: Path, *, mirror: str | None = None, say: Say
) -> list[DatabaseSize]:
    """Ask for the sizes of downloads.

    Raises:
        ConfigError: The mirror cannot be read, or lacks a file.
        NetworkError: The server cannot be reached, or lacks a file.
    """
    sizes = []
    for database in databases:
        present, download = is_present(database, folder), None
        if not present and database.kind != "rsync":
            with contextlib.ExitStack() as opened:
                download = sum(_open(url, mirror, opened, say).size for url in database.urls)
        sizes.append(DatabaseSize(database, download, is_present=present))
    return sizes


def check_room(sizes: Sequence[DatabaseSize], folder: Path) -> None:
    """Check that the disk has room for databases and their packed files.

    Raises:
        WriteError: It has not.
    """
    needed, free = sum(one.needed for one in sizes), shutil.disk_usage(folder).free
    have = sum(
        path.stat().st_size for one in sizes for path in (folder / one.database.name).glob("*.partial")
    )
    if needed - have > free:
        raise WriteError(
            f"{folder} has {free / 1e9:,.1f} GB free, the databases need about {(needed - have) / 1e9:,.1f} GB; choose "
            "a folder on another disk, or fewer databases (small_bfd replaces bfd and uniref30)"
        )


def is_present(database: PublishedDatabase, folder: Path) -> bool:
    """Return True if a folder has a whole database by its record.

    Raises:
        InputError: A file has another size than in the record.
    """
    record = _record(folder / database.name)
    if record is None:
        return False
    for name, entry in record["files"].items():
        path = folder / database.name / name
        size = path.stat().st_size if path.is_file() else -1
        if size != entry["size"]:
            raise InputError(
                f"expected {entry['size']:,} bytes by {RECORD}, found {'no file' if size < 0 else f'{size:,}'}; remove "
                f"{folder / database.name / RECORD} and download again",
                path=path,
            )
    return True


def download_databases(
    databases: Sequence[PublishedDatabase],
    folder: Path,
    *,
    mirror: str | None = None,
    say: Say = tell_nobody,
    progress: Progress = tell_nobody,
) -> list[Path]:
    """Download databases, and return their folders; those that are present are left alone.

    Each database gets a folder of its own in ``folder``, as with AlphaFold's scripts. The ``mirror`` is another source
    of the packed files: the address of a folder that has all of them, or a folder on the disk.

    Raises:
        ConfigError: The mirror cannot be read or lacks a file, or rsync is missing.
        NetworkError: A server cannot be reached or sends an invalid response.
        InputError: A file is damaged, or differs from its checksum; it is removed.
        WriteError: The disk has no room, or a file cannot be written.
    """
    prepare_output_directory(folder)
    with alone(folder, say):
        for database in databases:
            place = prepare_output_directory(folder / database.name)
            if is_present(database, folder):
                say(f"{database.name}: present")
                continue
            try:
                _bring(database, place, mirror, say, progress)
            except NetworkError as error:
                raise NetworkError(f"{error}. Run the same command again to resume") from error
            except OSError as error:
                problem = output_error(place, "write", error)
                raise WriteError(f"{problem}. Run the same command again to resume") from error
    return [folder / database.name for database in databases]


def _bring(
    database: PublishedDatabase, place: Path, mirror: str | None, say: Say, progress: Progress
) -> None:
    packed = [_fetch(url, place, mirror, say, progress) for url in database.urls]
    files: dict[str, dict[str, Any]] = {}
    if database.kind == "rsync":
        _rsync(place / MMCIF_FOLDER, mirror, say)
    if database.kind in ("rsync", "file"):
        files = {packed[0].name: {"size": packed[0].stat().st_size, "sha256": file_digest(packed[0])}}
    else:
        say(f"{database.name}: unpacking")
        try:
            if database.kind == "fasta":
                with _Written(place / database.product) as written:
                    for path in packed:
                        with gzip.open(path) as source:
                            written.copy(source)
                    files = {database.product: written.finish()}
            else:
                files = _unpack_archive(packed[0], place, database.product)
        except _DAMAGED as error:
            for path in packed:
                path.unlink(missing_ok=True)
            raise InputError(
                f"is damaged ({str(error) or 'ends too early'}) and was removed; run the same command again, or use "
                "another source (`mirror`)",
                path=packed[0],
            ) from None
    record = {"database": database.name, "urls": list(database.urls), "mirror": mirror, "files": files}
    write_atomic(place / RECORD, json.dumps(record, indent=1) + "\n")
    if database.kind in ("fasta", "archive"):
        for path in packed:
            path.unlink()


def _fetch(url: str, place: Path, mirror: str | None, say: Say, progress: Progress) -> Path:
    with contextlib.ExitStack() as opened:
        piece = _open(url, mirror, opened, say)
        path = place / piece.name
        if path.is_file() and path.stat().st_size == piece.size:
            return path
        return fetch_piece(piece, place, say=say, progress=progress)


def _open(url: str, mirror: str | None, opened: contextlib.ExitStack, say: Say) -> Piece:
    """Open a packed file at its address, or on the mirror."""
    name = url.rpartition("/")[2]
    if mirror is not None and mirror.startswith("rsync://"):
        mirror = None  # for the tree of mmCIF files alone
    if mirror is not None and "://" not in mirror:
        try:
            return local_piece(Path(mirror) / name, name, opened)
        except OSError as error:
            raise ConfigError(
                f"`mirror={mirror}`: {name} cannot be read ({error.strerror}); check the folder"
            ) from None
    address = url if mirror is None else f"{check_url(mirror, setting='`mirror`')}/{name}"
    return remote_piece(opened.enter_context(RemoteFile(address, retries=Retries(say=say))), name)


class _Written:
    """File that is written, counted and hashed, under a temporary name until :meth:`finish`; removed after an error."""

    def __init__(self, path: Path) -> None:
        self.path, self._temporary = path, path.with_name(f"{path.name}.unpacking")
        self._file, self._hash, self._size = self._temporary.open("wb"), hashlib.sha256(), 0

    def copy(self, source: Readable) -> None:
        """Append a source to its end."""
        while block := source.read(_BLOCK):
            self.write(block)

    def write(self, piece: bytes) -> None:
        """Append bytes to its end."""
        self._file.write(piece)
        self._hash.update(piece)
        self._size += len(piece)

    def finish(self) -> dict[str, Any]:
        """Move the file to its place; return its size and SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        return {"size": self._size, "sha256": self._hash.hexdigest()}

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def _unpack_archive(packed: Path, place: Path, product: str) -> dict[str, dict[str, Any]]:
    """Unpack the plain files of an archive whose names begin like the product's; nothing else is written."""
    with contextlib.ExitStack() as opened:
        files: dict[str, _Written] = {}
        plain = opened.enter_context(gzip.open(packed))
        for member in tar_members(plain, size=packed.stat().st_size * GZIP_EXPANSION):
            name = member.name.rpartition("/")[2]
            wanted = name.startswith(product.split("_")[0]) and _MEMBER.fullmatch(name) is not None
            if not (member.is_file and wanted) or name in files:
                continue
            files[name] = opened.enter_context(_Written(place / name))
            for piece in read_piecewise(plain, member):
                files[name].write(piece)
        while plain.read(_BLOCK):  # to the end, where the sum of all is
            pass
        if f"{product}_hhm.ffdata" not in files:
            raise TarMemberError(f"has no {product}_hhm.ffdata")
        return {name: file.finish() for name, file in files.items()}


def _rsync(folder: Path, mirror: str | None, say: Say) -> None:
    """Copy the PDB's mmCIF files, packed and divided into folders as in the archive."""
    program = shutil.which("rsync")
    if program is None:
        raise ConfigError(
            "pdb_mmcif needs the program rsync, which is not on PATH; install it (apt install rsync)"
        )
    source = MMCIF_SOURCE
    if mirror is not None:
        source = f"{mirror.rstrip('/')}/{MMCIF_FOLDER}/"
        if mirror.startswith(("http://", "https://")):
            raise ConfigError(
                f"`mirror={mirror}`: pdb_mmcif comes by rsync; give rsync://… or a folder, or leave the mirror out"
            )
    say(f"pdb_mmcif: rsync from {source}")
    folder.mkdir(exist_ok=True)
    line = [program, "--recursive", "--links", "--perms", "--times", "--delete", source, f"{folder}/"]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise NetworkError(f"rsync from {source} failed with exit code {done.returncode}: {said}")


def _record(place: Path) -> dict[str, Any] | None:
    record = json_object_or_none(place / RECORD) or {}
    try:
        sizes = [entry["size"] for entry in record["files"].values()]
    except (KeyError, TypeError, AttributeError):
        return None
    return record if all(isinstance(size, int) for size in sizes) else None
