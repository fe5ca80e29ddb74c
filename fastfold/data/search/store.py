"""Results of searches, kept by the sequence that was searched for and by everything else that decides them.

A result is a set of files. It lies in a folder of its own::

    <store>/<first two digits>/<SHA-256 of the sequence>/<name>-<digest of the settings>/
        <files of the result>
        record.json          what was searched, and the digest of each file

which is written under a temporary name and then renamed, so that it is whole or not there. Nothing in a store is ever
changed: a search with other settings, or of another version of a database, is another result. The same sequence
therefore is searched once, whatever it is called, and what was finished before an interruption is found again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.utils.atomic_files import output_error, sweep_temporary, temporary_name
from fastfold.utils.hashing import file_digest, input_hash

FOLDER = ".searches"
"""Name of the store within a folder of alignments; hidden, so that no target has it."""
RECORD = "record.json"


@dataclass(frozen=True)
class SearchKey:
    """What decides the result of a search besides the sequence.

    Attributes:
        name: What the result is called, ``uniref90`` for example: letters, digits and ``._-``.
        settings: The engine and its version, its settings, and the database by its digest or by its address. Any
            nesting of mappings with text keys, lists, text, numbers, booleans and None.
    """

    name: str
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits of the name and the settings together."""
        return input_hash(self.name, self.settings)


class SearchStore:
    """A folder of results of searches.

    Several processes may use one store: a result that two of them add is kept once.

    Args:
        folder: The store; it is made when the first result is added.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def place(self, sequence: str, key: SearchKey) -> Path:
        """The folder of a result, whether it is there or not."""
        digest = sequence_digest(sequence)
        return self.folder / digest[:2] / digest / f"{key.name}-{key.digest[:16]}"

    def find(self, sequence: str, key: SearchKey) -> dict[str, Path] | None:
        """The files of a result.

        Args:
            sequence: What was searched for: a chain, or the chains of a complex joined by ``:``; case does not count.
            key: What else decides the result.

        Returns:
            Paths by file name; None if the result is not there, or a file of it is not what was added.
        """
        place = self.place(sequence, key)
        try:
            record = json.loads((place / RECORD).read_bytes())
            if record["key"] != key.digest:
                return None
            files = {str(name): place / name for name in record["files"]}
            whole = all(file_digest(path) == record["files"][name] for name, path in files.items())
        except (OSError, ValueError, KeyError, TypeError):
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
        """Keep a result.

        Args:
            sequence: See :meth:`find`.
            key: See :meth:`find`.
            files: Contents by file name.
            facts: What else is worth knowing of the result, the number of hits for example; decides nothing.

        Returns:
            Paths by file name.

        Raises:
            WriteError: The store cannot be written; says what is missing. Nothing half-written is left.
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
                _write(temporary / name, content)
            self._move(temporary, place, sequence, key)
        except OSError as error:
            raise output_error(place, "write", error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return {name: place / name for name in files}

    def _move(self, temporary: Path, place: Path, sequence: str, key: SearchKey) -> None:
        """Rename a finished result to its place, unless another process was faster."""
        if place.exists() and self.find(sequence, key) is None:  # damaged
            shutil.rmtree(place)
        try:
            os.rename(temporary, place)
        except OSError:
            if self.find(sequence, key) is None:
                raise


def sequence_digest(sequence: str) -> str:
    """SHA-256 of a sequence in upper case, as 64 hexadecimal digits."""
    return hashlib.sha256(sequence.upper().encode("ascii")).hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
