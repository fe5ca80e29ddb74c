"""Record of an entry's samples: structure, alignments and template hits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from fastfold.data.templates.hits import TemplateHit
from fastfold.data.training import cache_format
from fastfold.data.training.complex_entry import ComplexData, ComplexMsas
from fastfold.data.training.entry import EntryData
from fastfold.errors import InputError

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
