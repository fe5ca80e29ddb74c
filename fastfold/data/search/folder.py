"""Put results of searches into the folder for ``--msa-dir``: ``<id>/uniref90_hits.sto`` and so on.

The files are hard links to those of the store, or copies on file systems without links. Their names are listed in the
folder's ``search.json``, so that other files are never replaced.
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
from fastfold.utils.text_files import json_object_or_none

RECORD = "search.json"


def chain_places(target: Target) -> dict[str, str]:
    """Return the folders of a target's alignments, relative to the folder of alignments.

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
    """Check, before a search, that its files ``<name>_hits.<format>`` will not replace others.

    The folder of the chain need not exist.

    Raises:
        OutputError: An alignment of that name exists that is not from a search.
    """
    endings = (".sto", ".a3m", ".sto.gz", ".a3m.gz")
    _own_files(place, name, dict.fromkeys(f"{name}_hits{ending}" for ending in endings))


def publish(place: Path, key: SearchKey, files: Mapping[str, Path]) -> None:
    """Put the files of a result into a chain's folder, replacing earlier ones of the same name.

    The folder is created if missing. ``files`` are paths in the store by file name.

    Raises:
        OutputError: A file of that name exists that is not from a search.
        WriteError: The folder cannot be written.
    """
    prepare_output_directory(place)
    sweep_temporary(place)
    digests = {name: file_digest(path) for name, path in files.items()}
    record, ours = _own_files(place, key.name, digests)
    # Listed before anything moves, so that our files are known after an interruption.
    replaced = {name: [x for x in known if x != digests.get(name)] for name, known in ours.items()}
    record[key.name] = {"settings": key.settings, "files": digests, "replaced": replaced}
    write_atomic(place / RECORD, json.dumps(record, indent=1) + "\n")
    for name, source in files.items():
        _link(source, place / name)
    for name in ours.keys() - files.keys():
        with contextlib.suppress(OSError):
            if file_digest(place / name) in ours[name]:
                (place / name).unlink()


def _own_files(
    place: Path, search: str, new: Mapping[str, str | None]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a folder's record, and the digests of a search's present and earlier files by name.

    ``new`` has the names of files to put there, with their digests once they are known.

    Raises:
        OutputError: A file of such a name is not from the search.
    """
    record = json_object_or_none(place / RECORD) or {}
    own = record.get(search, {})
    ours = {name: list(digests) for name, digests in own.get("replaced", {}).items()}
    for name, digest in own.get("files", {}).items():
        ours[name] = [digest, *(x for x in ours.get(name, ()) if x != digest)]
    for name, wanted in new.items():
        path = place / name
        try:
            is_ours = not os.path.lexists(path) or file_digest(path) in (wanted, *ours.get(name, ()))
        except OSError as error:
            raise output_error(path, "read", error) from error
        if not is_ours:
            raise OutputError(
                f"{path}: exists already, and is not from a search; move it away or choose another folder"
            )
    return record, ours


def _link(source: Path, path: Path) -> None:
    """Make ``path`` a hard link to ``source``, or a copy."""
    with contextlib.suppress(OSError):
        if path.samefile(source):
            return
    with replacing(path) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
