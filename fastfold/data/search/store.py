"""Results of searches, stored by sequence and by all other inputs of the search, and put into folders of alignments.

A result is a set of files, in a separate folder::

    <store>/<first two digits>/<SHA-256 of the sequence>/<name>-<digest of the settings>/
        <files of the result>
        record.json          key of the search, and the digest of each file

It is written under a temporary name and then renamed, so that it is complete or absent. Nothing in a store is ever
changed: a search with other settings, or with another version of a database, is another result. A sequence is therefore
searched once under any name, and results finished before an interruption are found again.

:func:`publish` puts a result into the folder for ``--msa-dir``, as hard links or as copies on file systems without
links. Their names are listed in the folder's ``search.json``, so that other files are never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.data.msa.search_listing import LISTING
from fastfold.data.targets import Target
from fastfold.errors import OutputError
from fastfold.utils.atomic_files import (
    output_error,
    prepare_output_directory,
    replacing,
    sweep_temporary,
    temporary_name,
    write_atomic,
)
from fastfold.utils.foreign_text import json_object_or_none
from fastfold.utils.hashing import file_digest, input_hash

FOLDER = ".searches"
"""Name of the store in a folder of alignments; hidden, so that it differs from any target."""
RECORD = "record.json"


@dataclass(frozen=True)
class SearchKey:
    """Inputs of a search other than the sequence."""

    name: str  #: Name of the result, for example ``uniref90``: letters, digits and ``._-``
    #: Engine with its version and settings, and the database by its digest or its address, as any nesting of mappings
    #: with text keys, lists, text, numbers, booleans and None
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Return 64 hexadecimal digits for the name and the settings."""
        return input_hash(self.name, self.settings)


class SearchStore:
    """Folder of results of searches, created with the first.

    Several processes may use one store: a result added by two of them is kept once.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def place(self, sequence: str, key: SearchKey) -> Path:
        """Return the folder of a result, which may not exist."""
        digest = sequence_digest(sequence)
        return self.folder / digest[:2] / digest / f"{key.name}-{key.digest[:16]}"

    def find(self, sequence: str, key: SearchKey) -> dict[str, Path] | None:
        """Find the paths of a result's files by name; None if it is missing, or a file of it has changed.

        The sequence is that of a chain, or those of a complex's chains joined by ``:``; case is ignored.
        """
        place = self.place(sequence, key)
        record = json_object_or_none(place / RECORD) or {}
        try:
            if record["key"] != key.digest:
                return None
            files = {str(name): place / name for name in record["files"]}
            whole = all(file_digest(path) == record["files"][name] for name, path in files.items())
        except (OSError, KeyError, TypeError, AttributeError):
            return None
        return files if whole else None

    def add(
        self,
        sequence: str,
        key: SearchKey,
        files: Mapping[str, bytes],
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> dict[str, Path]:
        """Add the files of a result, by name; return paths as :meth:`find`.

        ``facts``, for example the number of hits, are recorded too, but not a part of the result's identity.

        Raises:
            WriteError: The store cannot be written. Incomplete files are removed.
        """
        place = self.place(sequence, key)
        record = {
            "name": key.name,
            "key": key.digest,
            "sequence": sequence.upper(),
            "settings": key.settings,
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
            **(facts or {}),
        }
        temporary = place.parent / temporary_name()
        try:
            temporary.mkdir(parents=True)
            sweep_temporary(place.parent)
            for name, content in {**files, RECORD: (json.dumps(record, indent=1) + "\n").encode()}.items():
                with (temporary / name).open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            if place.exists() and self.find(sequence, key) is None:  # damaged
                shutil.rmtree(place)
            try:
                os.rename(temporary, place)
            except OSError:  # another process may have been faster
                if self.find(sequence, key) is None:
                    raise
        except OSError as error:
            raise output_error(place, "write", error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return {name: place / name for name in files}


def sequence_digest(sequence: str) -> str:
    """Return the SHA-256 of a sequence in upper case, as 64 hexadecimal digits."""
    return hashlib.sha256(sequence.upper().encode("ascii")).hexdigest()


def chain_places(target: Target) -> dict[str, str]:
    """Return the folder of each distinct whole sequence as given, relative to that of all alignments.

    It is ``<id>`` of a single chain, ``<id>/A`` of chain A of a complex. Chains with the same sequence share the folder
    of the first.
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
    earlier = {name: [x for x in known if x != digests.get(name)] for name, known in ours.items()}
    replaced = {name: known for name, known in earlier.items() if known}
    record[key.name] = {"settings": key.settings, "files": digests, "replaced": replaced}
    write_atomic(place / LISTING, json.dumps(record, indent=1) + "\n")
    for name, source in files.items():
        _link(source, place / name)
    for name in ours.keys() - files.keys():
        with contextlib.suppress(OSError):
            if file_digest(place / name) in ours[name]:
                (place / name).unlink()


def withdraw(place: Path, search: str) -> None:
    """Remove the results of a search from a chain's folder, and the folder if nothing else is in it.

    Raises:
        WriteError: The folder cannot be written.
    """
    if not (place / LISTING).is_file():
        return
    record, ours = _own_files(place, search, {})
    if search not in record:
        return
    try:
        for name, known in ours.items():
            if (place / name).is_file() and file_digest(place / name) in known:
                (place / name).unlink()
        del record[search]
        if record:
            write_atomic(place / LISTING, json.dumps(record, indent=1) + "\n")
        else:
            (place / LISTING).unlink()
            with contextlib.suppress(OSError):  # other files are in it
                place.rmdir()
    except OSError as error:
        raise output_error(place, "write", error) from error


def _own_files(
    place: Path, search: str, new: Mapping[str, str | None]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a folder's record, and the digests of a search's present and earlier files by name.

    ``new`` has the names of files to put there, with their digests once they are known.

    Raises:
        OutputError: A file of such a name is not from the search.
    """
    record = json_object_or_none(place / LISTING) or {}
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
