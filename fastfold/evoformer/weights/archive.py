"""Where the published parameters are read from: an archive on a server or on the disk, or a folder of its files.

An archive is data from anywhere: nothing in it decides where something is written, and its headers are read one block
at a time. The wanted files are found in it by name, and read where they lie.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from fastfold.errors import ConfigError, WeightsError
from fastfold.evoformer.weights.published import ARCHIVE, SOURCE
from fastfold.utils.http import check_url
from fastfold.utils.remote_file import RemoteFile

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


class Readable(Protocol):
    """A file on the disk or on a server."""

    def read(self, size: int, /) -> bytes:
        """Read ``size`` bytes, fewer only at the end."""

    def seek(self, offset: int, /) -> int:
        """Set the position."""


@dataclass(frozen=True)
class Piece:
    """Where a wanted file is read from.

    Attributes:
        name: The file's name.
        source: What it is in.
        offset: Where it begins there.
        size: Its bytes.
        version: Changes whenever what it is in does.
    """

    name: str
    source: Readable
    offset: int
    size: int
    version: tuple[object, ...]


@contextlib.contextmanager
def open_pieces(
    mirror: str | None, wanted: Sequence[str], say: Callable[[str], None]
) -> Iterator[Iterator[Piece] | list[Piece]]:
    """Find wanted files.

    Args:
        mirror: Address of the archive or of the folder that it is in, an archive, or a folder of either; None for where
            DeepMind publishes it.
        wanted: Names of files.
        say: Told of connections that broke.

    Yields:
        The files: all of them as a list, or one by one as they come if the archive can be read from its beginning to
        its end alone.

    Raises:
        ConfigError: There is nothing to read from, or it lacks a file.
        NetworkError: The server cannot be reached, has no archive, or makes no sense.
        WeightsError: It is not an archive, or lacks a file.
    """
    if mirror is None or "://" in mirror:
        url = SOURCE if mirror is None else check_url(mirror, setting="--mirror")
        if urlsplit(url).scheme == "http" and urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
            say(f"--mirror {url}: files over http:// can be changed on the way; use https:// if you can")
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
                f"--mirror {mirror}: cannot be read ({error.strerror}); check its name"
            ) from None


def _find(folders: list[Path], name: str, mirror: str) -> Path:
    """A file in the first folder that has it."""
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"--mirror {mirror}: there is neither {ARCHIVE} nor {name} in it")


def _whole_file(path: Path, name: str, opened: contextlib.ExitStack) -> Piece:
    """A file on the disk."""
    file = opened.enter_context(path.open("rb"))
    status = os.fstat(file.fileno())
    return Piece(name, file, 0, status.st_size, (status.st_size, status.st_mtime_ns))


def _pieces(
    source: Readable, place: str, wanted: Sequence[str], version: tuple[object, ...]
) -> Iterator[Piece]:
    """The wanted members of a tar archive in its order, the first of each name."""
    lacking, offset = list(wanted), 0
    for _ in range(_MAX_MEMBERS):
        source.seek(offset)
        header = source.read(_BLOCK)
        if not header.strip(b"\0") and offset > 0:  # the end of the archive, or of the file
            break
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            member = None
        if member is None or member.size < 0:
            where = f"at byte {offset:,}" if offset else f"it begins {header[:40]!r}"
            raise WeightsError(
                f"{place}: is not a tar archive, or damaged ({where}); an error page, perhaps. Take it from another "
                "place (--mirror)"
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
        f"{place}: the archive ends without {', '.join(lacking)}: it is truncated, or another one than {ARCHIVE}; take "
        "it from another place (--mirror)"
    )
