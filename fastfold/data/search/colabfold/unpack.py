"""Taking files out of an archive that a server sent, without trusting it: nothing is written, and sizes are limited."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib

from fastfold.errors import InputError

MAX_UNPACKED = 1 << 30
"""Most bytes that an archive may unpack to."""
_MAX_MEMBERS = 1000


def read_archive(data: bytes, wanted: frozenset[str], *, origin: str) -> dict[str, bytes]:
    """The wanted files of a ``tar.gz`` as bytes in memory.

    Args:
        data: The archive.
        wanted: Names of files; others are passed over.
        origin: Where it came from, for errors.

    Returns:
        Contents by name; of what is not there, nothing.

    Raises:
        InputError: It is not such an archive, is damaged or cut off, unpacks to too much, or has what an honest archive
            has not: links, devices, names that lead out of it, or two files of one name.
    """
    found: dict[str, bytes] = {}
    try:
        with (
            gzip.GzipFile(fileobj=io.BytesIO(data)) as packed,
            tarfile.open(fileobj=_Limited(packed, origin), mode="r|") as archive,
        ):
            for number, member in enumerate(archive):
                name = member.name.removeprefix("./")
                if number >= _MAX_MEMBERS:
                    raise _harmful(origin, f"has more than {_MAX_MEMBERS} members")
                if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
                    raise _harmful(origin, f"has a member {name[:60]!r} that leads out of it")
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise _harmful(origin, f"has a member {name[:60]!r} that is no plain file")
                if name not in wanted or member.isdir():
                    continue
                if name in found:
                    raise _harmful(origin, f"has two members {name!r}")
                content = archive.extractfile(member)
                assert content is not None
                found[name] = content.read()
            # A tar ends with empty blocks, and whoever cut it off there would leave a damaged gzip.
            while packed.read(1 << 20):
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InputError(
            f"the result is damaged or cut off ({error}); run the same command again", path=origin
        ) from None
    return found


def _harmful(origin: str, what: str) -> InputError:
    return InputError(f"the result {what}; nothing of it was used. Do not use this server", path=origin)


class _Limited(io.RawIOBase):
    """A stream that ends in an error when it gives more than is allowed."""

    def __init__(self, packed: gzip.GzipFile, origin: str) -> None:
        super().__init__()
        self._packed, self._origin, self._left = packed, origin, MAX_UNPACKED

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes."""
        piece = self._packed.read(min(self._left + 1, 1 << 20 if size is None or size < 0 else size))
        self._left -= len(piece)
        if self._left < 0:
            raise _harmful(self._origin, f"unpacks to more than {MAX_UNPACKED >> 20} MiB")
        return piece
