"""Entries of a training set in a file of records: a sequence that uses no memory per entry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, overload

import numpy as np

from fastfold.data.training.complex_entry import ComplexEntry
from fastfold.data.training.entry import Entry
from fastfold.data.training.packed.records import RecordFile, RecordWriter
from fastfold.data.training.sampling import sampling_weights
from fastfold.utils.text_files import FileSlice

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
        return entry_of(json.loads(self._file.record(self._table, index % self._count)))

    @property
    def weights(self) -> np.ndarray:
        """Return ``[E]`` float64 sampling weights, see :func:`fastfold.data.training.sampling.sampling_weights`."""
        return self._file.array(f"{self._table}/weights")


def add_entries(writer: RecordWriter, table: str, entries: Sequence[Entry]) -> None:
    """Write the entries of a table, with their weights."""
    for entry in entries:
        writer.add(table, json.dumps(entry_fields(entry), separators=(",", ":")).encode())
    writer.add_array(f"{table}/weights", sampling_weights(entries))


def weights_of(entries: Sequence[Entry]) -> np.ndarray:
    """Return ``[E]`` sampling weights of entries, without decoding those in a file."""
    return entries.weights if isinstance(entries, EntryList) else sampling_weights(entries)


def entry_fields(entry: Entry) -> dict[str, Any]:
    """Return the attributes of an entry that differ from the default, in JSON's types."""
    found: dict[str, Any] = {}
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
        found[field.name] = value
    return found


def entry_of(found: dict[str, Any]) -> Entry:
    """Build an entry from its fields; inverse of :func:`entry_fields`."""
    for name in _PATHS:
        if name in found:
            found[name] = Path(found[name])
    if "alignment_files" in found:
        found["alignment_files"] = tuple(
            FileSlice(Path(container), name, start, size)
            for container, name, start, size in found["alignment_files"]
        )
    if "members" in found:
        found["members"] = tuple(entry_of(member) for member in found["members"])
        return ComplexEntry(**found)
    return Entry(**found)
