"""Bytes of a text input file; every failure is an error for the user."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from fastfold.errors import InputError

PathLike = str | os.PathLike[str]

GZIP_MAGIC: Final = b"\x1f\x8b"
STDIN_NAME: Final = "stdin"  #: Name of the standard input in messages, in place of a file's name
_XZ_MAGIC: Final = b"\xfd7zXZ\x00"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_XZ_MEMORY = 1 << 28  #: Largest memory of the decoder in bytes; the usual presets need up to 65 MiB
_PIECE = 1 << 24
_UTF8_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class FileSlice(os.PathLike[str]):
    """File inside a larger file; the functions here read it like any other."""

    container: Path  #: The larger file
    name: str  #: Name of the inner file, with its ending
    start: int  #: Its first byte
    size: int  #: Number of its bytes

    def __fspath__(self) -> str:
        """Return the name for messages; no file has this path."""
        return os.path.join(self.container, self.name)

    @property
    def suffixes(self) -> list[str]:
        """Endings of its name, as :attr:`pathlib.Path.suffixes`."""
        return Path(self.name).suffixes

    def read_bytes(self) -> bytes:
        """Read its content, or raise OSError, or InputError if the larger file ends too early."""
        with open(self.container, "rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        if len(content) < self.size:
            raise InputError(
                f"{self.container.name} is cut off at byte {self.start + len(content):,}; copy it again",
                path=self,
            )
        return content


def read_text_bytes(path: PathLike, *, limit: int) -> bytes:
    """Read a text file, unpacked if its name ends in ``.gz``, without a UTF-8 byte order mark.

    Pipes and process substitutions work too: the file is read once from front to end, and never beyond
    ``limit``, so that neither an endless device nor a decompression bomb fills the memory.

    Raises:
        InputError: The file is missing, a folder, unreadable, too large, a damaged gzip, a gzip whose name
            does not end in ``.gz`` (or the other way round), or UTF-16.
    """
    data = _read(path, limit)
    if os.fspath(path).lower().endswith(".gz"):
        data = _unpack(data, path, limit)
    elif data.startswith(GZIP_MAGIC):
        raise InputError("is compressed with gzip; unpack it, or let its name end in .gz", path=path)
    return _checked(data, path, limit)


def read_file_bytes(path: PathLike, *, limit: int) -> bytes:
    """Read a file of any kind unchanged, or raise InputError: missing, a folder, unreadable, or too large."""
    data = _read(path, limit)
    if len(data) > limit:
        raise InputError(f"is larger than {limit:,} bytes, the most that is read from one file", path=path)
    return data


def read_packed_text(path: PathLike, *, limit: int) -> str:
    """Read a text file that may be packed by gzip or xz under any name, as recognised by its content.

    ``limit`` is the maximum size in bytes, after unpacking. Bytes other than UTF-8 are replaced.

    Raises:
        InputError: See :func:`read_text_bytes`; or the file is packed by zstd, or damaged.
    """
    data = _read(path, limit)
    if data.startswith(GZIP_MAGIC):
        data = _unpack(data, path, limit)
    elif data.startswith(_XZ_MAGIC):
        data = _unpack_xz(data, path, limit)
    elif data.startswith(_ZSTD_MAGIC):
        raise InputError("is packed by zstd; unpack it with unzstd, or pack it with gzip or xz", path=path)
    return _checked(data, path, limit).decode("utf-8", "replace")


def is_special(path: Path) -> bool:
    """Return True for a pipe or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_listed(path: Path) -> None:
    """Raise InputError if a file found in a folder is a pipe or device; a missing one is left to the reader."""
    if is_special(path):
        raise InputError("is not a regular file; remove it from the folder", path=path)


def read_stdin_bytes(*, limit: int) -> bytes:
    """Read the standard input, unpacked if it is a gzip, without a UTF-8 byte order mark.

    ``limit`` is the maximum size in bytes, after unpacking.

    Raises:
        InputError: The standard input is closed, too large, a damaged gzip, or UTF-16.
    """
    try:
        data = _read_up_to(sys.stdin.buffer, limit + 1)
    except (AttributeError, OSError, ValueError) as error:  # closed, or none at all
        raise InputError(f"cannot be read: {error}", path=STDIN_NAME) from None
    if data.startswith(GZIP_MAGIC):
        data = _unpack(data, STDIN_NAME, limit)
    return _checked(data, STDIN_NAME, limit)


def _checked(data: bytes, path: PathLike, limit: int) -> bytes:
    """Check size and encoding of unpacked bytes, and remove a byte order mark."""
    if len(data) > limit:
        raise InputError(f"is larger than {limit:,} bytes, the most that is read from one file", path=path)
    if data.startswith(_WIDE_BOMS):
        raise InputError("is text in UTF-16; save it as plain text (ASCII or UTF-8)", path=path)
    return data[len(_UTF8_BOM) :] if data.startswith(_UTF8_BOM) else data


def split_lines(text: str) -> list[str]:
    """Split a text into lines at LF, CRLF and CR only."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _read(path: PathLike, limit: int) -> bytes:
    """Read at most ``limit + 1`` raw bytes of the file."""
    try:
        if isinstance(path, FileSlice):
            return path.read_bytes() if path.size <= limit else bytes(limit + 1)
        if os.path.isdir(path):
            raise InputError("is a folder; name a file in it", path=path)
        with open(path, "rb") as file:
            return _read_up_to(file, limit + 1)
    except FileNotFoundError:
        raise InputError("no such file; check the name", path=path) from None
    except PermissionError:
        raise InputError("may not be read; change its permissions (chmod +r)", path=path) from None
    except ValueError as error:  # a NUL inside the name
        raise InputError(f"is not a valid file name: {error}", path=repr(path)) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=path, temporary=True) from None


def _read_up_to(file: BinaryIO | gzip.GzipFile, size: int) -> bytes:
    """Read at most ``size`` bytes in pieces, because one call would reserve all that memory beforehand."""
    pieces = []
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _unpack(data: bytes, path: PathLike, limit: int) -> bytes:
    """Unpack at most ``limit + 1`` bytes."""
    if not data.startswith(GZIP_MAGIC):
        raise InputError("is not a gzip file although its name ends in .gz; rename it", path=path)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _read_up_to(file, limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"is a damaged gzip file ({error}); download or copy it again", path=path) from None


def _unpack_xz(data: bytes, path: PathLike, limit: int) -> bytes:
    """Unpack at most ``limit + 1`` bytes."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    try:
        content = decoder.decompress(data, limit + 1)
    except lzma.LZMAError as error:
        raise InputError(f"is a damaged xz file ({error}); download or copy it again", path=path) from None
    if not decoder.eof and len(content) <= limit:
        raise InputError("is a damaged xz file (its end is missing); download or copy it again", path=path)
    return content
