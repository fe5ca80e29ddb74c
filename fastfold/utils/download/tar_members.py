"""Members of a tar archive from anywhere: a size in a header is never believed beyond the archive's own.

Python's ``tarfile`` skips a member by as many reads as its header says, and builds maps of sparse members of any
length, so that an archive of hundred bytes can occupy a processor for ever.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

GZIP_EXPANSION: Final = 1032
"""Largest number of bytes that a byte of gzip can unpack to."""

_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1 << 20
_MAX_HEADER = 1 << 20  # bytes of a long name or of PAX records
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
_RECORDS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_HEADERS = (*_RECORDS, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MOST_HEADERS = 8  # before one member


class TarMemberError(ValueError):
    """Error for an archive that is damaged, or has a member that no archive of data has; a phrase with its verb."""


class TarMember(NamedTuple):
    """Header of a member."""

    name: str  #: Its path in the archive
    offset: int  #: Offset of its content in the archive, in bytes
    size: int  #: Size of its content in bytes; 0 for a folder, a link or a device
    is_file: bool  #: True for a plain file
    is_folder: bool  #: True for a folder


class TarSource(Protocol):
    """Unpacked archive; ``seek`` sets a position from its beginning."""

    def read(self, size: int, /) -> bytes:
        """Read ``size`` bytes, or fewer at the end."""

    def seek(self, offset: int, /) -> int:
        """Set the position."""


def tar_members(source: TarSource, *, size: int) -> Iterator[TarMember]:
    """Yield the members of an archive in its order.

    The caller may read a member's content from the source, at its ``offset``, before it asks for the next one.

    Args:
        source: The archive. It is read forward, and a seek is only ever forward too if the caller reads in order.
        size: Largest size of the archive in bytes; the exact one if it is known.

    Raises:
        TarMemberError: A header is damaged, states more data than the archive can hold, or is of a sparse member.
    """
    offset = 0
    records: dict[str, str] = {}
    headers = 0
    while True:
        source.seek(offset)
        header = source.read(_BLOCK)
        if not header.strip(b"\0") and (
            offset > 0 or len(header) == _BLOCK
        ):  # end of the archive, or of the file
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            place = f"at byte {offset:,}" if offset else f"it starts with {header[:40]!r}"
            raise TarMemberError(f"is not a tar archive, or damaged ({place})") from None
        offset += _BLOCK
        is_header = info.type in _HEADERS
        length = info.size if is_header else _length(info, records)
        if length < 0:
            raise TarMemberError(f"is damaged (the size of its member {info.name[:60]!r})")
        if length > (_MAX_HEADER if is_header else size - offset):
            raise TarMemberError(
                f"is truncated or damaged (a member {info.name[:60]!r} of {length:,} bytes, more than it can hold)"
            )
        headers = headers + 1 if is_header else 0
        if headers > _MOST_HEADERS:
            raise TarMemberError("is damaged (a row of headers without a member)")
        if is_header:
            content = source.read(length)
            if len(content) < length:
                raise TarMemberError("ends too early")
            if info.type in _RECORDS:
                records |= _pax_records(content)
            elif info.type == tarfile.GNUTYPE_LONGNAME:
                records["path"] = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            name = records.get("path", info.name)
            if info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in records):
                raise TarMemberError(f"has a sparse member {name[:60]!r}")
            is_folder = info.type == tarfile.DIRTYPE
            yield TarMember(
                name.rstrip("/"), offset, length, info.type in _FILES and not is_folder, is_folder
            )
            records = {}
        offset += -(-length // _BLOCK) * _BLOCK


def read_piecewise(source: TarSource, member: TarMember) -> Iterator[bytes]:
    """Yield a member's content in pieces of at most a MiB.

    Raises:
        TarMemberError: The archive ends before the member does.
    """
    source.seek(member.offset)
    remaining = member.size
    while remaining:
        piece = source.read(min(remaining, _PIECE))
        if not piece:
            raise TarMemberError(f"ends within its member {member.name[:60]!r}")
        remaining -= len(piece)
        yield piece


def _length(info: tarfile.TarInfo, records: dict[str, str]) -> int:
    """Return the bytes of data after a header."""
    if info.type in _WITHOUT_DATA:
        return 0
    text = records.get("size", str(info.size))
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        return -1
    return int(text)


def _pax_records(content: bytes) -> dict[str, str]:
    """Return the records ``LENGTH KEY=VALUE`` of a PAX header."""
    records: dict[str, str] = {}
    place = 0
    while place < len(content) and content[place]:
        digits, blank, _ = content[place : place + 20].partition(b" ")
        length = int(digits) if blank and digits.isdigit() else 0
        record = content[place + len(digits) + 1 : place + length]
        key, equals, value = record.partition(b"=")
        if not equals or not record.endswith(b"\n"):
            raise TarMemberError(f"is damaged (its PAX record at byte {place:,} of a header)")
        records[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
        place += length
    return records
