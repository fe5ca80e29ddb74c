"""Files from a server or from the disk, copied to a temporary name, resumed, checked, and then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fastfold.errors import InputError, NetworkError
from fastfold.utils.download.answers import Say, tell_nobody
from fastfold.utils.download.remote_file import RemoteFile
from fastfold.utils.hashing import file_digest, input_hash

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes downloaded so far and the total bytes."""

_BLOCK = 1 << 16


class Readable(Protocol):
    """Readable file on the disk or on a server."""

    def read(self, size: int, /) -> bytes:
        """Read ``size`` bytes, or fewer at the end."""

    def seek(self, offset: int, /) -> int:
        """Set the position."""


@dataclass(frozen=True)
class Piece:
    """Part of a source that becomes a file, such as a member of an archive, or a source as a whole."""

    name: str  #: Name of the file
    place: str  #: Address or path of the source, for messages
    source: Readable  #: Source that contains it
    offset: int  #: Offset in the source, in bytes
    size: int  #: Size in bytes
    version: tuple[object, ...] = ()  #: Changes whenever the source changes
    digest: tuple[str, str] | None = None  #: Name and hexadecimal digits of the sum that the source states

    def partial_path(self, folder: Path) -> Path:
        """Return the path of an incomplete file; the name depends on the source's version."""
        return folder / f"{self.name}.{input_hash(self.version, self.offset, self.size)[:8]}.partial"


def local_piece(path: Path, name: str, opened: ExitStack) -> Piece:
    """Open a whole file on the disk until the end of a stack, or raise OSError."""
    file = opened.enter_context(path.open("rb"))
    status = os.fstat(file.fileno())
    return Piece(name, str(path), file, 0, status.st_size, (status.st_size, status.st_mtime_ns))


def remote_piece(remote: RemoteFile, name: str) -> Piece:
    """Return a whole file of a server, or raise NetworkError if its size is unknown."""
    if remote.size is None:
        raise NetworkError(f"{remote.url}: the server does not state the file's size; use another server")
    return Piece(name, remote.url, remote, 0, remote.size, (remote.version,), remote.digest)


def copy_piece(piece: Piece, path: Path, *, say: Say = tell_nobody, progress: Progress = tell_nobody) -> None:
    """Copy a piece to a file that may have its beginning already, and check its length and sum.

    Raises:
        InputError: The content differs from the sum that the source states; the file is removed.
        NetworkError: The server cannot be reached, or the file changed there; or the source ends before the piece does.
        OSError: The file cannot be written.
    """
    with path.open("ab") as file:
        if (done := file.tell()) > piece.size:  # not what this function wrote
            done = file.truncate(0)
        if done:
            say(f"{piece.name}: resuming after {done:,} of {piece.size:,} bytes")
        piece.source.seek(piece.offset + done)
        progress(piece.name, done, piece.size)
        while done < piece.size:
            block = piece.source.read(min(_BLOCK, piece.size - done))
            if not block:
                raise NetworkError(f"{piece.place}: ends within {piece.name}: it is truncated")
            file.write(block)
            done += len(block)
            progress(piece.name, done, piece.size)
        file.flush()
        os.fsync(file.fileno())
    if piece.digest is not None and file_digest(path, piece.digest[0]) != piece.digest[1]:
        path.unlink()
        raise InputError(
            f"differs from the {piece.digest[0]} sum that its server states, and was removed; run the same command "
            "again",
            path=piece.place,
        )


def fetch_piece(
    piece: Piece,
    folder: Path,
    *,
    check: Callable[[Path], None] = tell_nobody,
    say: Say = tell_nobody,
    progress: Progress = tell_nobody,
) -> Path:
    """Bring a piece to a folder, and return its path; a later call resumes an interrupted one.

    The file has the name of :meth:`Piece.partial_path` until it is complete and ``check`` accepts it. Incomplete files
    of other versions of the source are removed. The caller holds the folder's lock.

    Raises:
        FastFoldError: See :func:`copy_piece`, and the errors of ``check``.
        OSError: A file cannot be written.
    """
    partial = piece.partial_path(folder)
    for other in folder.glob(f"{piece.name}.*.partial"):
        if other != partial:
            other.unlink()
    copy_piece(piece, partial, say=say, progress=progress)
    check(partial)
    os.replace(partial, folder / piece.name)
    return folder / piece.name
