"""Sources of the published parameters: an archive on a server or on the disk, or a folder of its files.

An archive is untrusted data: its contents never decide where files are written, and its headers are read one block at
a time. Requested files are found by name and read in place, without unpacking.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fastfold.errors import ConfigError, WeightsError
from fastfold.evoformer.weights.published import ARCHIVE, SOURCE
from fastfold.utils.http import check_url
from fastfold.utils.remote_file import Readable, RemoteFile

_BLOCK = tarfile.BLOCKSIZE
_MAX_MEMBERS = 1000
_WITHOUT_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)


@dataclass(frozen=True)
class Piece:
    """Location of a requested file in its source."""

    name: str  #: Name of the file
    source: Readable  #: File or archive that contains it
    offset: int  #: Offset in the source, in bytes
    size: int  #: Size in bytes
    version: tuple[object, ...]  #: Changes whenever the source changes


@contextlib.contextmanager
def open_pieces(
    mirror: str | None, wanted: Sequence[str], say: Callable[[str], None]
) -> Iterator[Iterator[Piece] | list[Piece]]:
    """Open the source of published parameters and find files in it.

    Args:
        mirror: Address of the archive or of its folder, path of an archive, or path of a folder with the archive or
            its files; None for DeepMind's server.
        wanted: Names of files.
        say: Called with messages about broken connections.

    Yields:
        The files: a list of all, or an iterator in the archive's order if the archive can only be read from beginning
        to end.

    Raises:
        ConfigError: The mirror cannot be read, or lacks a file.
        NetworkError: The server cannot be reached, lacks the archive, or sends an invalid response.
        WeightsError: The source is not an archive, or lacks a file.
    """
    if mirror is None or "://" in mirror:
        url = SOURCE if mirror is None else check_url(mirror, setting="--mirror")
        if urlsplit(url).scheme == "http" and urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
            say(
                f"--mirror {url}: http:// does not protect files from changes on the way; use https:// if possible"
            )
        with RemoteFile(url if url.endswith(".tar") else f"{url}/{ARCHIVE}", say=say) as remote:
            found = _pieces(remote, remote.url, wanted, (remote.version,))
            yield list(found) if remote.ranges else found
        return
    path = Path(mirror)
    folders = [folder for folder in (path, path / "params") if folder.is_dir()]
    archives = [folder / ARCHIVE for folder in folders if (folder / ARCHIVE).is_file()]
    with contextlib.ExitStack() as opened:
        try:
            if path.is_dir() and not archives:
                yield [_whole_file(_find(folders, name, mirror), name, opened) for name in wanted]
            else:
                archive = archives[0] if archives else path
                whole = _whole_file(archive, archive.name, opened)
                yield list(_pieces(whole.source, str(archive), wanted, whole.version))
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise ConfigError(
                f"--mirror {mirror}: cannot be read ({error.strerror}); check the path"
            ) from None


def _find(folders: list[Path], name: str, mirror: str) -> Path:
    """Return the file in the first folder that has it."""
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"--mirror {mirror}: expected {ARCHIVE} or {name} in it, found neither")


def _whole_file(path: Path, name: str, opened: contextlib.ExitStack) -> Piece:
    file = opened.enter_context(path.open("rb"))
    status = os.fstat(file.fileno())
    return Piece(name, file, 0, status.st_size, (status.st_size, status.st_mtime_ns))


def _pieces(
    source: Readable, place: str, wanted: Sequence[str], version: tuple[object, ...]
) -> Iterator[Piece]:
    """Yield the wanted members of a tar archive in its order, the first of each name."""
    lacking, offset = list(wanted), 0
    for _ in range(_MAX_MEMBERS):
        source.seek(offset)
        header = source.read(_BLOCK)
        if not header.strip(b"\0") and offset > 0:  # end of the archive, or of the file
            break
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            member = None
        if member is None or member.size < 0:
            where = f"at byte {offset:,}" if offset else f"it starts with {header[:40]!r}"
            raise WeightsError(
                f"{place}: not a tar archive, or damaged ({where}); perhaps an error page. Use "
                "another source (--mirror)"
            )
        offset += _BLOCK
        name = member.name.removeprefix("./").removeprefix("params/")
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and name in lacking:
            lacking.remove(name)
            yield Piece(name, source, offset, member.size, version)
            if not lacking:
                return
        if member.type not in _WITHOUT_DATA:
            offset += -(-member.size // _BLOCK) * _BLOCK
    raise WeightsError(
        f"{place}: the archive ends without {', '.join(lacking)}; it is truncated, or is not {ARCHIVE}. Use another "
        "source (--mirror)"
    )
