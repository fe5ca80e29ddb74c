"""Alignment databases: alignments of many chains in a few files, with an index (OpenFold's ``alignment_db``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastfold.errors import InputError
from fastfold.utils.text_files import FileSlice, PathLike, read_json_object

_LIMIT = 1 << 34


class AlignmentDatabase(Mapping[str, tuple[FileSlice, ...]]):
    """Files of each chain: alignments and template hits.

    The index is JSON: ``{"1abc_A": {"db": "alignment_db_0.db", "files": [["uniref90_hits.a3m", start, size], …]}, …}``,
    for one database or several. The databases are in the same folder.

    Raises:
        InputError: The index cannot be read, is invalid, or names a missing database.
    """

    def __init__(self, index: PathLike) -> None:
        table = read_json_object(index, "names of chains to their files", limit=_LIMIT)
        self._index, self._table = index, table
        self._containers: dict[str, Path] = {}
        for name, data in table.items():
            self._check(name, data)

    def _check(self, name: str, data: Any) -> None:
        try:
            container, files = data["db"], data["files"]
            plain = all(
                isinstance(file, str)
                and not set(file) & set("/\\\0")
                and isinstance(number, int)
                and number >= 0
                for file, *numbers in files
                for number in numbers
            )
            complete = all(len(row) == 3 for row in files) and isinstance(container, str)
        except (TypeError, KeyError, ValueError):
            plain = complete = False
        if not (plain and complete):
            raise InputError(
                "must have a database ('db') and its files ('files', each with name, start and size); make the index "
                "again",
                path=self._index,
                record=name,
            )
        if container not in self._containers:
            path = Path(self._index).parent / container
            if set(container) & set("/\\\0") or not path.is_file():
                raise InputError(
                    f"the database {container!r} is missing in the folder of the index; put it there",
                    path=self._index,
                    record=name,
                )
            self._containers[container] = path

    def __getitem__(self, name: str) -> tuple[FileSlice, ...]:
        data = self._table[name]
        container = self._containers[data["db"]]
        return tuple(FileSlice(container, file, start, size) for file, start, size in data["files"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
