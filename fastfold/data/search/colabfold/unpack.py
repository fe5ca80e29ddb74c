"""Read files from an untrusted archive in memory, with limited sizes."""

from __future__ import annotations

import gzip
import io
import tarfile
import time
import zlib
from collections.abc import Container

from fastfold.errors import InputError

MAX_UNPACKED = 1 << 30  #: Largest decompressed size of an archive in bytes
_MAX_MEMBERS = 1000
_UNPACK_S = 600.0
_DAMAGE = (tarfile.TarError, EOFError, ArithmeticError, OSError, RecursionError, ValueError, zlib.error)


def read_archive(data: bytes, wanted: Container[str], *, origin: str) -> dict[str, bytes]:
    """Return the wanted files of a ``tar.gz`` as bytes by name; missing files are absent.

    Raises:
        InputError: The data are not such an archive, are damaged or truncated, decompress to too much, or contain
            links, devices, names that lead out of it, or two files of one name.
    """
    found: dict[str, bytes] = {}
    try:
        content = _unpack(data, origin)
        if b"GNU.sparse." in content:  # tarfile would read a map of any length
            raise _harmful(origin, "has a sparse member")
        # Seekable, so that a size in a header is an offset, which is not read piece by piece.
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for number, member in enumerate(archive):
                name = member.name.removeprefix("./")
                if number >= _MAX_MEMBERS:
                    raise _harmful(origin, f"has more than {_MAX_MEMBERS} members")
                if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
                    raise _harmful(origin, f"has a member {name[:60]!r} that leads out of it")
                if not 0 <= member.size <= MAX_UNPACKED:
                    raise _harmful(origin, f"has a member {name[:60]!r} of {member.size} bytes")
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise _harmful(origin, f"has a member {name[:60]!r} that is not a plain file")
                if name not in wanted or member.isdir():
                    continue
                if name in found:
                    raise _harmful(origin, f"has two members {name!r}")
                file = archive.extractfile(member)
                assert file is not None
                found[name] = file.read()
    except _DAMAGE as error:
        raise InputError(
            f"the result is damaged or truncated ({error}); run the same command again", path=origin
        ) from None
    return found


def _harmful(origin: str, what: str) -> InputError:
    return InputError(f"the result {what}; none of it was used. Do not use this server", path=origin)


def _unpack(data: bytes, origin: str) -> bytes:
    """Decompress a gzip to its end, so that truncation is detected."""
    pieces, left, end = [], MAX_UNPACKED, time.monotonic() + _UNPACK_S
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        while piece := packed.read(1 << 20):
            left -= len(piece)
            if left < 0:
                raise _harmful(origin, f"unpacks to more than {MAX_UNPACKED >> 20} MiB")
            if time.monotonic() > end:
                raise _harmful(origin, f"does not unpack within {_UNPACK_S / 60:.0f} minutes")
            pieces.append(piece)
    return b"".join(pieces)
