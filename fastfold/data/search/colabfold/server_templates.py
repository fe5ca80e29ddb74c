"""Archives of an MSA server, which are not trusted, and the template hits in them.

These are mmCIF files of PDB70's chains, and their profiles as a database of HH-suite.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tempfile
import time
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastfold.data.search.colabfold.source import template_file
from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.utils.download.tar_members import TarMemberError, tar_members

MAX_HITS = 20  #: Hits whose structures are fetched, as in ColabFold

DATABASE = "pdb70"
_PROFILES = ("a3m.ffdata", "a3m.ffindex", "hhm.ffdata", "hhm.ffindex")
_CIF = re.compile(r"[0-9][0-9a-z]{3}\.cif", re.ASCII)


class _Wanted:
    """Files of an archive that are used, recognised by their names."""

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return text in {f"{DATABASE}_{end}" for end in _PROFILES} or _CIF.fullmatch(text) is not None


def check_templates(data: bytes, *, origin: str) -> dict[str, bytes]:
    """Return the contents of a server's ``tar.gz`` of template hits by name: the database's and mmCIF files.

    Raises:
        InputError: The archive cannot be used, or a file of the database is missing.
    """
    files = read_archive(data, _Wanted(), origin=origin)
    missing = [name for end in _PROFILES if (name := f"{DATABASE}_{end}") not in files]
    if missing:
        raise InputError(
            f"expected template hits with {', '.join(missing)}, found none; run the command again without `templates`",
            path=origin,
        )
    return files


@contextmanager
def unpacked_templates(path: Path) -> Iterator[Path]:
    """Unpack a file of template hits into a temporary folder: a database ``pdb70`` and mmCIF files.

    Raises:
        InputError: The file cannot be used.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path, temporary=True) from None
    files = check_templates(data, origin=os.fspath(path))
    with tempfile.TemporaryDirectory(prefix="fastfold-templates-") as name:
        folder = Path(name)
        for member, content in files.items():
            (folder / member).write_bytes(content)
        # hhsearch opens these, but compares with all profiles, so that they may be empty.
        (folder / f"{DATABASE}_cs219.ffindex").write_bytes(files[f"{DATABASE}_a3m.ffindex"])
        (folder / f"{DATABASE}_cs219.ffdata").write_bytes(b"")
        yield folder


def find_server_templates(msa_dir: Path, target: Target) -> dict[str, Path]:
    """Return the files of template hits among a target's alignments, by sequence."""
    paths = ((chain.sequence, msa_dir / target.name / template_file(chain)) for chain in target.chains)
    return {sequence: path for sequence, path in paths if path.is_file()}


MAX_UNPACKED = 1 << 30  #: Largest decompressed size of an archive in bytes
_MAX_MEMBERS = 1000
_UNPACK_S = 600.0
_DAMAGE = (EOFError, OSError, TarMemberError, zlib.error)


def read_archive(data: bytes, wanted: Container[str], *, origin: str) -> dict[str, bytes]:
    """Return the wanted files of a ``tar.gz`` as bytes by name; missing files are absent.

    Raises:
        InputError: The data are not such an archive, are damaged or truncated, decompress to too much, or contain
            links, devices, names that lead out of it, or two files of one name.
    """
    files: dict[str, bytes] = {}
    try:
        content = _unpack(data, origin)
        for number, member in enumerate(tar_members(io.BytesIO(content), size=len(content))):
            name = member.name.removeprefix("./")
            if number >= _MAX_MEMBERS:
                raise _harmful(origin, f"has more than {_MAX_MEMBERS} members")
            if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
                raise _harmful(origin, f"has a member {name[:60]!r} that leads out of it")
            if not (member.is_file or member.is_folder):
                raise _harmful(origin, f"has a member {name[:60]!r} that is not a plain file")
            if name not in wanted or member.is_folder:
                continue
            if name in files:
                raise _harmful(origin, f"has two members {name!r}")
            files[name] = content[member.offset : member.offset + member.size]
    except _DAMAGE as error:
        raise InputError(
            f"the result is damaged or truncated ({error}); run the same command again", path=origin
        ) from None
    return files


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
