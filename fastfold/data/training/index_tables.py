"""Tables of a training set: ``index.tsv``, OpenFold's tables of chains and duplicates, and alignment databases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastfold.data.templates.database import parse_date
from fastfold.errors import InputError
from fastfold.utils.foreign_text import plain_float, read_json_object
from fastfold.utils.text_files import FileSlice, PathLike, read_text_bytes, split_lines

_LIMIT, _MAX_INDEX = 1 << 33, 1 << 34
_CLUSTER_COLUMNS = ("cluster", "cluster30")


@dataclass(frozen=True)
class ChainRecord:
    """Data of a chain in a table; empty or None if unknown."""

    sequence: str = ""  #: One-letter residues
    split: str = ""  #: Name of its split
    chain_id: str = ""  #: Name in the structure file
    cluster: str = ""  #: Name of its sequence cluster
    cluster_size: int = 1  #: Number of chains in its cluster, 1 if unknown
    resolution: float | None = None  #: Resolution of the structure in Å
    release_date: str = ""  #: ``YYYY-MM-DD``
    msa_rows: int | None = None  #: Number of rows of its alignment, or None


def read_index(path: PathLike) -> dict[str, ChainRecord]:
    """Read ``index.tsv``: tab-separated columns with names in the first line, one chain per line.

    ``name`` is required. ``split``, ``chain``, ``sequence``, ``cluster`` (or ``cluster30``), ``resolution``,
    ``release_date`` and ``msa_rows`` are used if present; other columns are ignored.

    Raises:
        InputError: The file cannot be read, a line has another number of columns than the first, a name is repeated or
            could lead out of the folder, or a number or date is invalid.
    """
    lines = split_lines(read_text_bytes(path, limit=_LIMIT).decode("utf-8", "replace"))
    columns = lines[0].split("\t")
    if "name" not in columns:
        raise InputError(
            "the first line must name the columns, separated by tabs, including 'name'", path=path, line=1
        )
    cluster = next((column for column in _CLUSTER_COLUMNS if column in columns), "")
    records: dict[str, ChainRecord] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fail = partial(InputError, path=path, line=number)
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise fail(
                f"has {len(cells)} columns, but the first line names {len(columns)}; the file may be truncated"
            )
        row = dict(zip(columns, cells, strict=True))
        name, split = row["name"], row.get("split", "")
        for value in (name, split):
            if value in (".", "..") or any(character in value for character in "/\\\0"):
                raise fail(f"{value!r} is not the name of a file")
        if not name or name in records:
            raise fail("the name is missing or repeated", record=name or None)
        fail = partial(fail, record=name)
        records[name] = ChainRecord(
            sequence=row.get("sequence", "").upper(),
            split=split,
            chain_id=row.get("chain", ""),
            cluster=row.get(cluster, ""),
            resolution=_resolution(row.get("resolution"), fail),
            release_date=_date(row.get("release_date"), fail),
            msa_rows=_rows(row.get("msa_rows"), fail),
        )
    return records


def read_chain_data_cache(path: PathLike) -> dict[str, ChainRecord]:
    """Read the ``chain_data_cache.json`` of OpenFold's ``generate_chain_data_cache.py``.

    It maps ``<id>_<chain>`` to ``seq``, ``release_date``, ``resolution`` (Å; 0 for none) and ``cluster_size`` (null or
    -1 if unknown).

    Raises:
        InputError: The file cannot be read or is not such a table.
    """
    table = read_json_object(path, "names of chains to their data", limit=_LIMIT)
    return {name: _cached_record(name, data, path) for name, data in table.items()}


def read_duplicates(path: PathLike) -> list[list[str]]:
    """Read OpenFold's ``duplicate_pdb_chains.txt``: names of chains with equal sequences on each line.

    Raises:
        InputError: The file cannot be read, or a name is repeated or could lead out of the folder.
    """
    lines = split_lines(read_text_bytes(path, limit=_LIMIT).decode("utf-8", "replace"))
    groups, seen = [], set()
    for number, line in enumerate(lines, 1):
        names = line.split()
        for name in names:
            if name in seen or any(character in name for character in "/\\\0"):
                raise InputError(
                    "a name is repeated, or is not the name of a file", path=path, line=number, record=name
                )
            seen.add(name)
        if names:
            groups.append(names)
    return groups


def _cached_record(name: str, data: Any, path: PathLike) -> ChainRecord:
    fail = partial(InputError, path=path, record=name)
    if not isinstance(data, dict) or not isinstance(data.get("seq"), str) or not data["seq"]:
        raise fail("lacks a sequence ('seq'); make the file again")
    size = data.get("cluster_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise fail(f"cluster_size must be a whole number or null, found {size!r}")
    return ChainRecord(
        sequence=data["seq"].upper(),
        cluster_size=size if size is not None and size > 0 else 1,
        resolution=_resolution(data.get("resolution"), fail),
        release_date=_date(data.get("release_date"), fail),
    )


def _resolution(value: Any, fail: Callable[[str], InputError]) -> float | None:
    """Parse a resolution in Å; return None if it is missing or 0 (NMR, predictions)."""
    if value is None or value == "":
        return None
    try:
        resolution = plain_float(str(value))
    except (TypeError, ValueError):
        resolution = math.nan
    if not 0 <= resolution < math.inf:
        raise fail(f"the resolution must be a number of Å, found {value!r}")
    return resolution or None


def _rows(value: str | None, fail: Callable[[str], InputError]) -> int | None:
    if value and not value.isdecimal():
        raise fail(f"msa_rows must be a whole number, found {value!r}")
    return int(value) if value else None


def _date(value: Any, fail: Callable[[str], InputError]) -> str:
    if value is None or value == "":
        return ""
    released = parse_date(value) if isinstance(value, str) else None
    if released is None:
        raise fail(f"the release date must be YYYY-MM-DD, found {value!r}")
    return released.isoformat()


class AlignmentDatabase(Mapping[str, tuple[FileSlice, ...]]):
    """Files of each chain: alignments and template hits.

    The index is JSON: ``{"1abc_A": {"db": "alignment_db_0.db", "files": [["uniref90_hits.a3m", start, size], …]}, …}``,
    for one database or several. The databases are in the same folder.

    Raises:
        InputError: The index cannot be read, is invalid, or names a missing database.
    """

    def __init__(self, index: PathLike) -> None:
        table = read_json_object(index, "names of chains to their files", limit=_MAX_INDEX)
        self._index, self._table = index, table
        self._containers: dict[str, Path] = {}
        for name, data in table.items():
            self._check(name, data)

    def _check(self, name: str, data: Any) -> None:
        fail = partial(InputError, path=self._index, record=name)
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
            raise fail(
                "must have a database ('db') and its files ('files', each with name, start and size); make the index "
                "again"
            )
        if container not in self._containers:
            path = Path(self._index).parent / container
            if set(container) & set("/\\\0") or not path.is_file():
                raise fail(f"the database {container!r} is missing in the folder of the index; put it there")
            self._containers[container] = path

    def __getitem__(self, name: str) -> tuple[FileSlice, ...]:
        data = self._table[name]
        container = self._containers[data["db"]]
        return tuple(FileSlice(container, file, start, size) for file, start, size in data["files"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
