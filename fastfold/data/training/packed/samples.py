"""Packed sets: the entries of a training set with the data of their samples, in one file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastfold.data.loading.loader import SampleLoader, retry_io
from fastfold.data.templates.hits import TemplateHit
from fastfold.data.training import cache_format
from fastfold.data.training.cache import parser_version
from fastfold.data.training.entry import ComplexData, ComplexMsas, Entry, EntryData
from fastfold.data.training.packed.records import RecordWriter, add_entries, writing_records
from fastfold.data.training.templates import read_candidates
from fastfold.errors import ConfigError, InputError
from fastfold.utils.text_files import PathLike

SAMPLES = "samples"  #: Name of the table of these records
_VERSION = f"records of layout {cache_format.LAYOUT_VERSION}"
_MAX_RECORD = 1 << 30
_LEVEL = 1
"""Compression level of zlib: alignments shrink to a quarter, and decompress faster than most disks read."""


def to_record(data: EntryData | ComplexData, hits: Mapping[str, Sequence[TemplateHit]]) -> bytes:
    """Serialise an entry's data to a record; alignments shared by chains are stored once.

    Data of a predicted structure have all residues; hits are those of
    :func:`fastfold.data.training.templates.read_candidates`.
    """
    if isinstance(data, ComplexData):
        msas = dict(zip((chain.sequence for chain in data.chains), data.alignments, strict=True))
    else:
        msas = {data.chain.sequence: ComplexMsas(data.alignments)}
    found_hits = [
        cache_format.hits_arrays(found) | {"sequence": cache_format.text_array(sequence)}
        for sequence, found in hits.items()
    ]
    arrays = {
        "kind": cache_format.text_array("complex" if isinstance(data, ComplexData) else "chain"),
        "resolution": cache_format.optional(data.resolution),
        "release_date": cache_format.text_array(data.release_date),
        **cache_format.many("chains", [cache_format.chain_arrays(chain) for chain in data.chains]),
        "sequences": cache_format.text_array("\n".join(msas)),
        **cache_format.many("hits", found_hits),
    }
    for number, of_chain in enumerate(msas.values()):
        for kind, several in of_chain._asdict().items():
            arrays |= cache_format.many(f"{kind}{number}_", [cache_format.msa_arrays(msa) for msa in several])
    return zlib.compress(cache_format.to_bytes(arrays, _VERSION, ""), _LEVEL)


def of_record(record: bytes) -> EntryData | ComplexData:
    """Parse an entry's data with its template hits from a record.

    Raises:
        InputError: The record has another version, or is damaged.
    """
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(record, _MAX_RECORD)
        if unpacker.unconsumed_tail:
            raise cache_format.Unusable(f"it unpacks to more than {_MAX_RECORD >> 20} MiB")
        if not unpacker.eof:
            raise cache_format.Unusable("it is truncated")
        arrays = cache_format.from_bytes(content, _VERSION, "")
    except cache_format.OtherVersion:
        raise InputError("the packed set was built by another version of FastFold; build it again") from None
    except (cache_format.Unusable, zlib.error) as error:
        raise InputError(f"a record of the packed set cannot be read ({error}); build it again") from None
    chains = tuple(cache_format.chain_of(part) for part in cache_format.parts_of("chains", arrays))
    msas = {
        sequence: ComplexMsas(
            *(
                tuple(cache_format.msa_of(part) for part in cache_format.parts_of(f"{kind}{number}_", arrays))
                for kind in ComplexMsas._fields
            )
        )
        for number, sequence in enumerate(cache_format.string_of(arrays["sequences"]).split("\n"))
    }
    resolution = cache_format.number_or_none(arrays["resolution"])
    date = cache_format.string_of(arrays["release_date"])
    hits = {
        cache_format.string_of(part["sequence"]): cache_format.hits_of(part)
        for part in cache_format.parts_of("hits", arrays)
    }
    if cache_format.string_of(arrays["kind"]) == "chain":
        alignments = msas[chains[0].sequence].unpaired
        return EntryData(chains[0], alignments, resolution, date, hits)
    of_chains = tuple(msas[chain.sequence] for chain in chains)
    return ComplexData(chains, of_chains, resolution, date, hits)


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
