"""File of many records with checksums, read by any number of processes through a memory map.

Layout: 64 bytes (magic, offset, length and CRC-32 of the header), then records and arrays, then the header in JSON.
Records are in named tables; their offsets, sizes and CRC-32 are arrays of the file. Entries of a training set are such
a table, which uses no memory per entry.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from fastfold.data.training.entry import ComplexEntry, Entry
from fastfold.data.training.sampling import sampling_weights
from fastfold.errors import InputError
from fastfold.utils.atomic_files import replacing
from fastfold.utils.foreign_text import parse_json
from fastfold.utils.text_files import FileSlice, PathLike

_MAGIC = b"FastFoldRecords1"
_START = struct.Struct("<16sQQI28x")
_ALIGNMENT = 64


@contextmanager
def writing_records(path: PathLike) -> Iterator[RecordWriter]:
    """Write a file of records, which appears when the block ends without an error.

    Raises:
        WriteError: The file cannot be written.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        writer = RecordWriter(file)
        yield writer
        writer.finish()


class RecordWriter:
    """Writer of a file of records; see :func:`writing_records`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tables: dict[str, list[tuple[int, int, int]]] = {}
        self._arrays: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._meta: dict[str, Any] = {}
        self._write(bytes(_START.size))

    def add(self, table: str, record: bytes) -> None:
        """Append a record to a table."""
        start = self._write(record)
        self._tables.setdefault(table, []).append((start, len(record), zlib.crc32(record)))

    def add_array(self, name: str, array: np.ndarray) -> None:
        """Add an array under a name."""
        self._write(bytes(-self._file.tell() % _ALIGNMENT))
        start = self._write(np.ascontiguousarray(array).tobytes())
        self._arrays[name] = (array.dtype.str, array.shape, start)

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Set the metadata (JSON's types) returned by ``RecordFile.meta``."""
        self._meta = dict(meta)

    def _write(self, data: bytes) -> int:
        start = self._file.tell()
        self._file.write(data)
        return start

    def finish(self) -> None:
        """Write the header; nothing can be added afterwards."""
        for table, rows in self._tables.items():
            columns = np.array(rows, np.int64).reshape(-1, 3).T
            self.add_array(f"{table}/start", columns[0])
            self.add_array(f"{table}/size", columns[1])
            self.add_array(f"{table}/crc32", columns[2].astype(np.uint32))
        header = json.dumps({"meta": self._meta, "arrays": self._arrays}).encode()
        start = self._write(header)
        self._file.seek(0)
        self._file.write(_START.pack(_MAGIC, start, len(header), zlib.crc32(header)))


def is_packed(path: PathLike) -> bool:
    """Return True if the first bytes are those of a file of records."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class RecordFile:
    """Reader of a file written by :func:`writing_records`; picklable.

    Raises:
        InputError: The file cannot be read, has another format, or is truncated or damaged.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        try:
            self._map: np.ndarray = np.memmap(self.path, np.uint8, "r")
        except FileNotFoundError:
            raise InputError("no such file; check the name", path=path) from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error}", path=path) from None
        head = self._map[: _START.size].tobytes()
        if len(head) < _START.size or not head.startswith(_MAGIC):
            raise InputError("is not a packed training set of this version; build it again", path=path)
        _, start, size, checksum = _START.unpack(head)
        header = self._map[start : start + size].tobytes()
        if len(header) != size or zlib.crc32(header) != checksum:
            raise InputError("is truncated or damaged; copy it or build it again", path=path)
        try:
            content = parse_json(header, path)
            self.meta: dict[str, Any] = dict(content["meta"])
            self._arrays: dict[str, Any] = dict(content["arrays"])
            for name in self._arrays:
                self.array(name)  # checks that it is inside the file, and its shape
        except (InputError, ValueError, KeyError, TypeError, OverflowError):
            raise InputError("has an unknown header; build it again", path=path) from None

    def __reduce__(self) -> tuple[type[RecordFile], tuple[Path]]:
        return RecordFile, (self.path,)

    def count(self, table: str) -> int:
        """Return the number of records in a table, 0 for an unknown table."""
        return int(self._arrays[f"{table}/start"][1][0]) if f"{table}/start" in self._arrays else 0

    def array(self, name: str) -> np.ndarray:
        """Return an array of the memory map, which uses no memory of the process."""
        dtype, shape, start = self._arrays[name]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return self._map[start : start + size].view(dtype).reshape(shape)

    def record(self, table: str, index: int) -> bytes:
        """Return a record.

        Raises:
            InputError: Its checksum does not match its bytes.
        """
        start, size = (int(self.array(f"{table}/{name}")[index]) for name in ("start", "size"))
        content = self._map[start : start + size].tobytes()
        if zlib.crc32(content) != int(self.array(f"{table}/crc32")[index]):
            raise InputError(
                f"record {index} of {table!r} is damaged (its checksum differs); copy the file or build it again",
                path=self.path,
            )
        return content


def open_packed(path: PathLike) -> RecordFile | None:
    """Open a file of records; return None for a folder or another file.

    Raises:
        InputError: The file of records is truncated or damaged.
    """
    return RecordFile(path) if is_packed(path) else None


_PATHS = ("structure", "alignment_dir")


class EntryList(Sequence[Entry]):
    """Entries of a table, decoded on access."""

    def __init__(self, file: RecordFile, table: str) -> None:
        self._file, self._table = file, table
        self._count = file.count(table)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, index: int | slice) -> Entry | tuple[Entry, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self._count)))
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return entry_of(parse_json(self._file.record(self._table, index % self._count), self._file.path))

    @property
    def weights(self) -> np.ndarray:
        """Return ``[E]`` float64 sampling weights, see :func:`fastfold.data.training.sampling.sampling_weights`."""
        return self._file.array(f"{self._table}/weights")


def add_entries(writer: RecordWriter, table: str, entries: Sequence[Entry]) -> None:
    """Write the entries of a table, with their weights."""
    for entry in entries:
        writer.add(table, json.dumps(entry_fields(entry), separators=(",", ":")).encode())
    writer.add_array(f"{table}/weights", sampling_weights(entries))


@dataclass(frozen=True)
class Scanned:
    """Result of a scan."""

    sets: Mapping[str, Sequence[Entry]]  #: Entries by the name of their set
    meta: Mapping[str, Any]  #: Further data in JSON's types


def write_scanned(path: PathLike, scanned: Scanned) -> None:
    """Write the result of a scan, for :func:`scanned_of`.

    Raises:
        WriteError: The file cannot be written.
    """
    with writing_records(path) as writer:
        for name, entries in scanned.sets.items():
            add_entries(writer, name, entries)
        writer.set_meta({"sets": list(scanned.sets), "more": dict(scanned.meta)})


def scanned_of(file: RecordFile) -> Scanned:
    """Return the sets of entries in a file of records, with the further data of their scan."""
    return Scanned({name: EntryList(file, name) for name in file.meta["sets"]}, file.meta["more"])


def weights_of(entries: Sequence[Entry]) -> np.ndarray:
    """Return ``[E]`` sampling weights of entries, without decoding those in a file."""
    return entries.weights if isinstance(entries, EntryList) else sampling_weights(entries)


def entry_fields(entry: Entry) -> dict[str, Any]:
    """Return the attributes of an entry that differ from the default, in JSON's types."""
    values: dict[str, Any] = {}
    for field in fields(entry):
        value = getattr(entry, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        if field.name in _PATHS:
            value = str(value)
        elif field.name == "alignment_files":
            value = [[str(file.container), file.name, file.start, file.size] for file in value]
        elif field.name == "members":
            value = [entry_fields(member) for member in value]
        values[field.name] = value
    return values


def entry_of(values: dict[str, Any]) -> Entry:
    """Build an entry from its fields; inverse of :func:`entry_fields`."""
    for name in _PATHS:
        if name in values:
            values[name] = Path(values[name])
    if "alignment_files" in values:
        values["alignment_files"] = tuple(
            FileSlice(Path(container), name, start, size)
            for container, name, start, size in values["alignment_files"]
        )
    if "members" in values:
        values["members"] = tuple(entry_of(member) for member in values["members"])
        return ComplexEntry(**values)
    return Entry(**values)
