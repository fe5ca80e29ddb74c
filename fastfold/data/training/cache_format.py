"""File format of cache entries: npz without pickles, with a version and a hash of the sources.

The zip's checksums detect damage. Missing atoms and columns without deletions take no space.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np

from fastfold.data.features.coevolution import Coevolution
from fastfold.data.msa.msa import Msa
from fastfold.data.templates.hits import TemplateHit
from fastfold.data.training.entry import ComplexMsas, EntryData
from fastfold.protein.structure import ChainStructure

LAYOUT_VERSION = 1  # version of the arrays below

Arrays = dict[str, np.ndarray]


class Unusable(Exception):
    """Entry that must be made again."""


class OtherVersion(Unusable):
    """Entry of another version of the parsers."""


def to_bytes(arrays: Mapping[str, np.ndarray], version: str, digest: str) -> bytes:
    """Serialise arrays to a file for :func:`from_bytes`."""
    buffer = io.BytesIO()
    np.savez(buffer, version=np.array([version, digest]), **dict(arrays))  # type: ignore[arg-type]
    return buffer.getvalue()


def from_bytes(content: bytes, version: str, digest: str) -> Arrays:
    """Read the arrays of a file.

    Raises:
        OtherVersion: The entry was made by another version.
        Unusable: The entry is damaged, or belongs to other sources.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > len(content):  # entries are stored without compression
            raise Unusable(f"it unpacks to {size:,} bytes, more than its own {len(content):,}")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if file["version"][0] != version:
                raise OtherVersion
            arrays = dict(file)
        if arrays["version"][1] != digest:
            raise Unusable("it belongs to another chain")
        return arrays
    except Unusable:
        raise
    except Exception as error:  # any error of the zip and npy readers
        raise Unusable(f"{type(error).__name__}: {error}") from None


def chain_arrays(chain: ChainStructure) -> Arrays:
    """Convert a chain to arrays."""
    observed = chain.mask > 0
    return {
        "chain_id": text_array(chain.chain_id),
        "sequence": text_array(chain.sequence),
        "residue_index": chain.residue_index,
        "observed": np.packbits(observed),
        "positions": chain.positions[observed],
        "b_factors": chain.b_factors[observed],
    }


def chain_of(arrays: Mapping[str, np.ndarray]) -> ChainStructure:
    """Convert arrays to a chain; inverse of :func:`chain_arrays`."""
    sequence = string_of(arrays["sequence"])
    length = len(sequence)
    observed = np.unpackbits(arrays["observed"], count=length * 37).reshape(length, 37).astype(bool)
    positions = np.zeros((length, 37, 3), np.float32)
    positions[observed] = arrays["positions"]
    b_factors = np.zeros((length, 37), np.float32)
    b_factors[observed] = arrays["b_factors"]
    return ChainStructure(
        chain_id=string_of(arrays["chain_id"]),
        sequence=sequence,
        positions=positions,
        mask=observed.astype(np.float32),
        residue_index=arrays["residue_index"],
        b_factors=b_factors,
    )


def msa_arrays(msa: Msa) -> Arrays:
    """Convert an alignment to arrays."""
    where = np.flatnonzero(msa.deletions)
    return {
        "columns": np.array(msa.deletions.shape[1]),
        "rows": text_array("".join(msa.sequences)),
        "deleted": np.stack([where, msa.deletions.reshape(-1)[where].astype(np.int64)]),
        "descriptions": text_array("\n".join(msa.descriptions)),
    }


def msa_of(arrays: Mapping[str, np.ndarray]) -> Msa:
    """Convert arrays to an alignment; inverse of :func:`msa_arrays`."""
    rows, length = string_of(arrays["rows"]), int(arrays["columns"])
    sequences = tuple(rows[start : start + length] for start in range(0, len(rows), length))
    deletions = np.zeros(len(rows), np.int32)
    where, number = arrays["deleted"]
    deletions[where] = number
    descriptions = tuple(string_of(arrays["descriptions"]).split("\n"))
    return Msa(sequences, deletions.reshape(-1, length), descriptions)


def coevolution_arrays(coevolution: Coevolution) -> Arrays:
    """Convert the coevolution of an alignment to arrays; scores keep eleven bits."""
    scores = {} if coevolution.scores is None else {"scores": coevolution.scores.astype(np.float16)}
    return {
        "profile": coevolution.profile,
        "conservation": coevolution.conservation,
        "log_effective_rows": np.array(coevolution.log_effective_rows),
        **scores,
    }


def coevolution_of(arrays: Mapping[str, np.ndarray]) -> Coevolution:
    """Convert arrays to coevolution; inverse of :func:`coevolution_arrays`."""
    scores = arrays.get("scores")
    return Coevolution(
        None if scores is None else scores.astype(np.float32),
        arrays["profile"],
        arrays["conservation"],
        float(arrays["log_effective_rows"]),
    )


def hits_arrays(hits: Sequence[TemplateHit]) -> Arrays:
    """Convert template hits to arrays."""
    places = [place for hit in hits for place in (*hit.indices_query, *hit.indices_hit)]
    return {
        "names": text_array("\n".join(hit.name for hit in hits)),
        "letters": text_array("\n".join(f"{hit.query}\n{hit.hit_sequence}" for hit in hits)),
        "numbers": np.array(
            [(h.index, h.aligned_cols, len(h.indices_query)) for h in hits], np.int64
        ).reshape(-1, 3),
        "sum_probs": np.array([np.nan if hit.sum_probs is None else hit.sum_probs for hit in hits]),
        "places": np.array(places, np.int32),
    }


def hits_of(arrays: Mapping[str, np.ndarray]) -> list[TemplateHit]:
    """Convert arrays to template hits; inverse of :func:`hits_arrays`."""
    names, letters = (string_of(arrays[key]).split("\n") for key in ("names", "letters"))
    places, start = arrays["places"].tolist(), 0
    hits = []
    for i, (index, aligned, columns) in enumerate(arrays["numbers"].tolist()):
        total = float(arrays["sum_probs"][i])
        middle, end = start + columns, start + 2 * columns
        sum_probs = None if np.isnan(total) else total
        indices = tuple(places[start:middle]), tuple(places[middle:end])
        query, shown = letters[2 * i], letters[2 * i + 1]
        hits.append(TemplateHit(index, names[i], aligned, sum_probs, query, shown, *indices))
        start = end
    return hits


def data_arrays(data: EntryData, hits: Mapping[str, Sequence[TemplateHit]] | None = None) -> Arrays:
    """Convert an entry's data to arrays, with template hits by sequence; chains share alignments stored once."""
    msas = dict(zip((chain.sequence for chain in data.chains), data.msas, strict=True))
    arrays = {
        "resolution": optional(data.resolution),
        "release_date": text_array(data.release_date),
        **many("chains", [chain_arrays(chain) for chain in data.chains]),
        "sequences": text_array("\n".join(msas)),
    }
    if hits is not None:
        parts = [hits_arrays(chain_hits) | {"sequence": text_array(key)} for key, chain_hits in hits.items()]
        arrays |= many("hits", parts)
    for number, of_chain in enumerate(msas.values()):
        for kind, several in of_chain._asdict().items():
            arrays |= many(f"{kind}{number}_", [msa_arrays(msa) for msa in several])
    return arrays


def data_of(arrays: Mapping[str, np.ndarray]) -> EntryData:
    """Convert arrays to an entry's data; inverse of :func:`data_arrays`."""
    chains = tuple(chain_of(part) for part in parts_of("chains", arrays))
    msas = {}
    for number, sequence in enumerate(string_of(arrays["sequences"]).split("\n")):
        groups = (parts_of(f"{kind}{number}_", arrays) for kind in ComplexMsas._fields)
        msas[sequence] = ComplexMsas(*(tuple(map(msa_of, parts)) for parts in groups))
    hits = None
    if "hits" in arrays:
        hits = {string_of(part["sequence"]): hits_of(part) for part in parts_of("hits", arrays)}
    resolution, date = number_or_none(arrays["resolution"]), string_of(arrays["release_date"])
    of_chains = tuple(msas[chain.sequence] for chain in chains)
    return EntryData(chains, of_chains, resolution, release_date=date, hits=hits)


def optional(value: float | None) -> np.ndarray:
    """Convert a number to ``[1]`` float64, and None to ``[0]``."""
    return np.array([] if value is None else [value], np.float64)


def number_or_none(array: np.ndarray) -> float | None:
    """Convert an array to a number or None; inverse of :func:`optional`."""
    return float(array[0]) if len(array) else None


def many(name: str, parts: list[Arrays]) -> Arrays:
    """Pack the arrays of several parts and their number."""
    packed = {f"{name}{i}/{key}": array for i, part in enumerate(parts) for key, array in part.items()}
    return {name: np.array(len(parts)), **packed}


def parts_of(name: str, arrays: Mapping[str, np.ndarray]) -> list[Arrays]:
    """Split a packed array into its parts; inverse of :func:`many`."""
    return [
        {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        for prefix in (f"{name}{i}/" for i in range(int(arrays[name])))
    ]


def text_array(value: str) -> np.ndarray:
    """Convert text to ``[L]`` uint8."""
    return np.frombuffer(value.encode("utf-8"), np.uint8)


def string_of(value: np.ndarray) -> str:
    """Convert an array to text; inverse of :func:`text_array`."""
    return value.tobytes().decode("utf-8")
