"""Template hits of an MSA server: mmCIF files of PDB70's chains, and their profiles as a database of HH-suite."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastfold.data.search.colabfold.source import template_file
from fastfold.data.search.colabfold.unpack import read_archive
from fastfold.data.targets import Target
from fastfold.errors import InputError

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
            f"expected template hits with {', '.join(missing)}, found none; run the command again without --templates",
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
