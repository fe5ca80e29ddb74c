"""Build packed sets: the entries of a training set with the data of their samples, in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastfold.data.loading.loader import SampleLoader
from fastfold.data.loading.retry import retry_io
from fastfold.data.training.cache import parser_version
from fastfold.data.training.entry import Entry, EntryData
from fastfold.data.training.packed.entries import add_entries
from fastfold.data.training.packed.records import RecordWriter, writing_records
from fastfold.data.training.packed.samples import SAMPLES, to_record
from fastfold.data.training.templates import read_candidates
from fastfold.errors import ConfigError
from fastfold.utils.text_files import PathLike

_SAID_EVERY = 1000


@dataclass(frozen=True)
class MakeRecord:
    """Maker of an entry's record; pickled for the loader's workers."""

    read: Callable[[Entry], Any]  #: Reads an entry with all its residues

    def __call__(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        """Return the record of ``entry``, ``record`` ``[bytes]`` uint8."""
        return retry_io(partial(self._make, entry))

    def _make(self, entry: Entry) -> dict[str, np.ndarray]:
        data: EntryData = self.read(entry)
        hits = {
            sequence: read_candidates(path, sequence)
            for sequence, path in entry.template_hits(data.chains).items()
        }
        return {"record": np.frombuffer(to_record(data, hits), np.uint8)}


def build(
    path: PathLike,
    sets: Mapping[str, Sequence[Entry]],
    make: MakeRecord,
    *,
    meta: Mapping[str, Any],
    workers: int = 0,
    say: Callable[[str], None] = print,
) -> list[tuple[str, str]]:
    """Build a packed set, and return names and reasons of invalid entries, which are left out.

    Raises:
        ConfigError: All entries of a set are invalid.
        WriteError: The file cannot be written.
    """
    failed: list[tuple[str, str]] = []
    number = 0
    with writing_records(path) as writer:
        for name, entries in sets.items():

            def of_set(line: str, name: str = name) -> None:
                say(f"{name}: {line}")

            kept, bad = _add_samples(writer, entries, make, number, workers, of_set)
            if entries and not kept:
                first, reason = bad[0]
                raise ConfigError(
                    f"none of {len(entries)} entries of {name} can be used; the first is {first}: {reason}"
                )
            add_entries(writer, name, kept)
            failed += bad
            number += len(kept)
        writer.set_meta({**meta, "sets": list(sets), "version": parser_version(), "failed": failed})
    return failed


def _add_samples(
    writer: RecordWriter,
    entries: Sequence[Entry],
    make: MakeRecord,
    first: int,
    workers: int,
    say: Callable[[str], None],
) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Write the records of a set; return its entries with record numbers, and failed ones."""
    kept: list[Entry] = []
    if not entries:
        return kept, []
    # The limit is one more than the number of entries, so that failures never stop the build.
    with SampleLoader(
        make, entries, workers=workers, prefetch=2 * workers, max_failures=len(entries) + 1
    ) as loader:
        for draw in loader:
            writer.add(SAMPLES, draw.sample["record"].tobytes())
            kept.append(replace(entries[draw.number], record=first + len(kept)))
            if len(kept) % _SAID_EVERY == 0:
                say(f"{len(kept):,} of {len(entries):,} entries")
        say(f"{len(kept):,} of {len(entries):,} entries are packed")
        return kept, loader.quarantined
