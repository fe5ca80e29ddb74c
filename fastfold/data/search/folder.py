"""Putting results of searches where ``--msa-dir`` finds them: ``<id>/uniref90_hits.sto`` and so on.

The files are hard links to those of the store, or copies where the file system has no links. What was put into a folder
is listed in its ``search.json``, so that a file of somebody else is never replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastfold.data.search.store import SearchKey
from fastfold.data.targets import Target
from fastfold.errors import OutputError
from fastfold.utils.atomic_files import (
    output_error,
    prepare_output_directory,
    replacing,
    sweep_temporary,
    write_atomic,
)
from fastfold.utils.hashing import file_digest

RECORD = "search.json"


def chain_places(target: Target) -> dict[str, str]:
    """Where the alignments of a target lie, relative to the folder of alignments.

    Args:
        target: The target.

    Returns:
        Folder of each distinct sequence of a whole chain, as it was given: ``<id>`` of a single chain, ``<id>/A`` of
        chain A of a complex. Chains with the same sequence share the folder of the first.
    """
    places: dict[str, str] = {}
    for chain in target.uncut.chains:
        place = f"{target.name}/{chain.id}" if target.is_complex else target.name
        places.setdefault(chain.letters or chain.sequence, place)
    return places


def check_place(place: Path, name: str) -> None:
    """See, before a search, that its alignments will not stand in the way of others.

    Args:
        place: The folder of a chain; it need not be there.
        name: What was searched; its files are called ``<name>_hits.<format>``.

    Raises:
        OutputError: There is an alignment of that name which was not put there by a search.
    """
    ours = _listed(_read(place / RECORD).get(name, {}))
    for ending in (".sto", ".a3m", ".sto.gz", ".a3m.gz"):
        path = place / f"{name}_hits{ending}"
        if os.path.lexists(path) and _digest(path) not in ours.get(path.name, ()):
            raise _foreign(path)


def publish(place: Path, key: SearchKey, files: Mapping[str, Path]) -> list[Path]:
    """Put the files of a result into the folder of a chain, in place of an earlier result of the same name.

    Args:
        place: The folder of the chain; it is made if it is not there.
        key: What was searched.
        files: Paths in the store by file name.

    Returns:
        The paths in the folder.

    Raises:
        OutputError: A file of that name is there which was not put there by a search.
        WriteError: The folder cannot be written; says what is missing.
    """
    prepare_output_directory(place)
    sweep_temporary(place)
    record = _read(place / RECORD)
    digests = {name: file_digest(path) for name, path in files.items()}
    ours = _listed(record.get(key.name, {}))
    for name, digest in digests.items():
        path = place / name
        if os.path.lexists(path) and _digest(path) not in (digest, *ours.get(name, ())):
            raise _foreign(path)
    # Listed before anything moves: after an interruption, too, it is known which files are ours.
    replaced = {name: [x for x in known if x != digests.get(name)] for name, known in ours.items()}
    record[key.name] = {"settings": key.settings, "files": digests, "replaced": replaced}
    write_atomic(place / RECORD, json.dumps(record, indent=1) + "\n")
    for name, source in files.items():
        _link(source, place / name)
    for name in ours.keys() - files.keys():
        with contextlib.suppress(OSError):
            if file_digest(place / name) in ours[name]:
                (place / name).unlink()
    return [place / name for name in files]


def _listed(own: Mapping[str, Any]) -> dict[str, list[str]]:
    """Digests that the files of a search have or had, by file name."""
    listed = {name: list(digests) for name, digests in own.get("replaced", {}).items()}
    for name, digest in own.get("files", {}).items():
        listed[name] = [digest, *(x for x in listed.get(name, ()) if x != digest)]
    return listed


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise output_error(path, "read", error) from error


def _foreign(path: Path) -> OutputError:
    return OutputError(
        f"{path}: is there already, and not from a search; move it away or choose another folder"
    )


def _read(path: Path) -> dict[str, Any]:
    """The record of a folder; empty if there is none that can be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _link(source: Path, path: Path) -> None:
    """Make ``path`` the same file as ``source``, or a copy of it."""
    with contextlib.suppress(OSError):
        if path.samefile(source):
            return
    with replacing(path) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
