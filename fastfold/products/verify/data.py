"""Compare the data pipeline and the template search with recorded runs of AlphaFold."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from fastfold.data.features.assembly import monomer_features, multimer_features
from fastfold.data.features.merging import chain_order, paired_lines
from fastfold.data.msa.find import find_alignments
from fastfold.data.msa.find import read_hits as read_alignment
from fastfold.data.msa.msa import ChainMsas
from fastfold.data.queries.fasta import read_fasta
from fastfold.data.targets import Chain
from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.hits import TemplateHit, TemplateSkipped, is_ranked, parse_hmmsearch
from fastfold.data.templates.search import hmmsearch
from fastfold.data.templates.select import ChainTemplates, choose_templates
from fastfold.data.templates.source import read_hits
from fastfold.errors import InputError
from fastfold.utils.download.tar_members import GZIP_EXPANSION, read_piecewise, tar_members
from fastfold.utils.foreign_text import parse_json


class MissingInputError(InputError):
    """Record that lacks a required file.

    Example:
        >>> from fastfold.products.verify import MissingInputError, verify
        >>> try:
        ...     list(verify("no_such_record"))
        ... except MissingInputError as error:
        ...     print(error)
        no_such_record/config.json: no such file; give the folder of a recorded run
    """


class RecordedArray(NamedTuple):
    """Array of FastFold and its recorded counterpart, from a stable sort where the record's is unstable."""

    name: str
    ours: np.ndarray
    theirs: np.ndarray


def check_present(*paths: Path, message: str = "no such file") -> None:
    """Raise MissingInputError for the first file that a record lacks."""
    for path in paths:
        if not path.is_file():
            raise MissingInputError(message, path=path)


@contextmanager
def reading(path: Path, problem: str, *, missing: str = "no such file") -> Iterator[None]:
    """Raise MissingInputError for a missing file, and InputError with the ``problem`` of an unreadable one."""
    check_present(path, message=missing)
    try:
        yield
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise InputError(f"{problem}: {error}", path=path) from None


DECISIONS = "expected_decisions.json"  #: File that identifies such a record
ENTRIES = "expected.json"  #: File that identifies a record of AlphaFold's mmCIF reader

_DIFFERENCES = "expected_v2.3.2_differences.json"
"""Entries that the newest version of AlphaFold reads differently; a record may lack them."""
TEMPLATE_DATE = "2021-11-01"  #: Latest release date of all recorded searches
_HITS = ("expected_pdb_hits.sto", "expected_pdb_hits.hhr")
_REASONS = {
    "features": ("used",),
    "obsolete, removed": ("withdrawn",),
    "prefilter: DateError": ("date",),
    "prefilter: AlignRatioError": ("coverage",),
    "prefilter: DuplicateError": ("duplicate",),
    "prefilter: LengthError": ("short",),
    "date in mmCIF after max_template_date": ("late",),
    "extract: NoChainsError": ("unreadable", "no chains"),
    "extract: NoAtomDataInTemplateError": ("broken", "not found"),
    "extract: TemplateAtomMaskAllZerosError": ("no atoms",),
    "extract: QueryToTemplateAlignError": ("not found", "other sequence"),
    "crash": ("not found", "other sequence"),
}
"""FastFold's reasons by those of AlphaFold; where AlphaFold crashes, FastFold reports a reason."""
_VARIANTS = {"default": (False, True), "release": (True, True), "noobsolete_max3": (False, False)}
"""Recorded settings: True if release dates and the list of obsolete entries are given."""


def compare_templates(directory: Path, expected: Mapping[str, np.ndarray]) -> Iterator[RecordedArray]:
    """Search for templates, parse the recorded hits, and compute the features of a record.

    The folder has the query, its UniRef90 alignment, the recorded hits and decisions. The database is next to the
    folder above, as ``template_db``, or ``template_db_errors`` for a record named ``errors_…``.
    """
    directory = directory.resolve()
    check_present(directory / _QUERY)
    (target,) = read_fasta(directory / _QUERY)
    query = target.chains[0].sequence
    name = "template_db_errors" if directory.name.startswith("errors_") else "template_db"
    database = directory.parent.parent / name
    path = next((directory / file for file in _HITS if (directory / file).is_file()), None)
    if path is None:
        raise MissingInputError(f"has none of {', '.join(_HITS)}", path=directory)
    if path.suffix == ".sto":
        check_present(directory / "uniref90_hits.sto", database / "pdb_seqres.txt")
        alignment = read_alignment(directory / "uniref90_hits.sto", query=query)
        hits_text = hmmsearch(alignment, database / "pdb_seqres.txt")
        yield _text("search", _without_program(hits_text), _without_program(path.read_text()))
    hits = read_hits(path, query)
    yield from _hits(hits, expected)
    decisions = _json(directory / DECISIONS)
    with TemporaryDirectory() as folder:
        unpack_entries(database / "mmcif.tar.gz", Path(folder))
        for variant, (with_dates, with_obsolete) in _VARIANTS.items():
            recorded = decisions[variant]
            entries = MmcifFolder(
                folder,
                obsolete=database / "obsolete.dat" if with_obsolete else None,
                release_dates=database / "release_dates.txt" if with_dates else None,
                official_errors=True,
            )
            limit = date.fromisoformat(recorded["max_template_date"])
            chosen = choose_templates(
                hits, query, entries, max_templates=recorded["max_hits"], max_date=limit
            )
            yield from _decisions(variant, chosen, recorded["decisions"], ranked=is_ranked(hits))
            if "crash" not in recorded:
                yield from _features("" if variant == "default" else f"{variant}/", chosen, expected)


def compare_entries(directory: Path, expected: Mapping[str, np.ndarray]) -> Iterator[RecordedArray]:
    """Read every mmCIF file of a record: sequences, dates, and atoms of each chain; errors as of :func:`.verify`.

    The folder has ``expected.json``; the files are in ``template_db`` next to it. Missing files are skipped.
    """
    directory = directory.resolve()
    recorded = _json(directory / ENTRIES)
    if (directory / _DIFFERENCES).exists():
        recorded |= _json(directory / _DIFFERENCES)
    with TemporaryDirectory() as folder:
        unpack_entries(directory.parent / "template_db" / "mmcif.tar.gz", Path(folder))
        for path in directory.glob("*.cif"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        database = MmcifFolder(folder, official_errors=True)
        for pdb_id, theirs in recorded.items():
            if (Path(folder) / f"{pdb_id}.cif").is_file():
                yield from _entry(database, pdb_id, theirs, expected)


def unpack_entries(archive: Path, folder: Path) -> None:
    """Unpack the files of an archive into a folder, without their paths in it, or raise InputError."""
    problem = "not a readable archive"
    with reading(archive, problem, missing=f"{problem}: no such file"), gzip.open(archive) as packed:
        for member in tar_members(packed, size=archive.stat().st_size * GZIP_EXPANSION):
            if member.is_file:
                (folder / Path(member.name).name).write_bytes(b"".join(read_piecewise(packed, member)))


def _json(path: Path) -> dict[str, Any]:
    with reading(path, "not a readable record"):
        return dict(parse_json(path.read_bytes(), path))


def _text(name: str, ours: str, theirs: str) -> RecordedArray:
    return RecordedArray(name, _bytes(ours.splitlines()), _bytes(theirs.splitlines()))


def _bytes(texts: Sequence[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], dtype="S")


def _without_program(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#=GF AU"))


def _hits(hits: Sequence[TemplateHit], expected: Mapping[str, np.ndarray]) -> Iterator[RecordedArray]:
    ours: dict[str, np.ndarray] = {
        "index": np.array([hit.index for hit in hits]),
        "name": _bytes([hit.name for hit in hits]),
        "aligned_cols": np.array([hit.aligned_cols for hit in hits]),
        "sum_probs": np.array([-1.0 if hit.sum_probs is None else hit.sum_probs for hit in hits]),
        "query": _bytes([hit.query for hit in hits]),
        "hit_sequence": _bytes([hit.hit_sequence for hit in hits]),
    }
    for field in ("indices_query", "indices_hit"):
        rows = [getattr(hit, field) for hit in hits]
        ours[field] = np.array([place for row in rows for place in row])
        ours[f"{field}_len"] = np.array([len(row) for row in rows])
    for name, array in ours.items():
        theirs = expected[f"hits/{name}"]
        if theirs.dtype.kind == "f":
            theirs = np.where(np.isnan(theirs), -1.0, theirs)
        yield RecordedArray(f"hits/{name}", array, theirs)


def _decisions(
    variant: str, chosen: ChainTemplates, recorded: Sequence[Mapping[str, Any]], *, ranked: bool
) -> Iterator[RecordedArray]:
    """Yield the decision about each hit, and the mapping of the query onto each template."""
    ours = list(chosen.outcomes)
    if any(row["outcome"] == "crash" for row in recorded):
        ours = ours[: len(recorded)]
    words = []
    for number, row in enumerate(recorded):
        mine = ours[number].reason if number < len(ours) else ""
        allowed = _REASONS[row["outcome"]]
        if row["repeated_template_sequence"] and not ranked:
            allowed = ("repeated",)
        words.append(mine if mine in allowed else row["outcome"])
    indices = np.array([one.index for one in ours]), np.array([row["index"] for row in recorded])
    yield RecordedArray(f"{variant}/hit", *indices)
    yield RecordedArray(f"{variant}/outcome", _bytes([o.reason for o in ours]), _bytes(words))
    used = {template.name: template for template in chosen.templates}
    for row in recorded:
        template = used.get(row.get("template_domain_name") or "")
        if "mapping" not in row or template is None or row["template_sequence"] != template.sequence:
            continue
        pairs = row.get("realigned_mapping") or [[a, b + row["mapping_offset"]] for a, b in row["mapping"]]
        last = max(template.mapping.values())
        theirs = {mine: place if place >= 0 else last for mine, place in pairs}
        places = (np.array(sorted(mapping.items())) for mapping in (template.mapping, theirs))
        yield RecordedArray(f"{variant}/mapping of {row['index']}", *places)


def _features(
    prefix: str, chosen: ChainTemplates, expected: Mapping[str, np.ndarray]
) -> Iterator[RecordedArray]:
    """Yield the template features; a record without templates has an empty one, or empty arrays."""
    ours = chosen.features()
    for name, theirs in expected.items():
        if name.startswith(f"{prefix}template_"):
            mine = ours.get(name.removeprefix(prefix))
            yield RecordedArray(name, np.zeros_like(theirs) if mine is None else mine, theirs)


def _entry(
    database: MmcifFolder, pdb_id: str, theirs: Mapping[str, Any], expected: Mapping[str, np.ndarray]
) -> Iterator[RecordedArray]:
    try:
        entry = database.entry(pdb_id)
    except TemplateSkipped:
        entry = None
    usable = entry is not None and bool(entry.sequences)
    yield RecordedArray(f"{pdb_id}/usable", np.array([usable]), np.array([not theirs["errors"]]))
    if entry is None or theirs["errors"]:
        return
    yield _text(f"{pdb_id}/sequences", _table(entry.sequences), _table(theirs["chain_to_seqres"]))
    yield _text(f"{pdb_id}/date", entry.release_date, theirs["header"]["release_date"])
    for chain_id in entry.sequences:
        key = f"{pdb_id}_{chain_id}"
        if f"{key}/mask_sum" not in expected:
            continue
        chain = entry.chain(chain_id)
        sums = (chain.positions.astype(np.float64) * chain.mask[..., None]).sum(0)
        yield RecordedArray(f"{key}/mask_sum", chain.mask.sum(0), expected[f"{key}/mask_sum"])
        yield RecordedArray(f"{key}/position_sum", sums, expected[f"{key}/position_sum"])
        if f"{key}/positions" in expected:
            yield RecordedArray(f"{key}/positions", chain.positions, expected[f"{key}/positions"])
            yield RecordedArray(f"{key}/mask", chain.mask, expected[f"{key}/mask"])


def _table(sequences: Mapping[str, str]) -> str:
    return "\n".join(f"{chain_id} {sequence}" for chain_id, sequence in sequences.items())


EXPECTED = "expected.npz"  #: File that identifies such a record

_QUERY = "query.fasta"
_PAIRED_ROWS = "debug/paired_rows"


def compute_recorded(directory: Path, expected: dict[str, np.ndarray]) -> Iterator[RecordedArray]:
    """Compute the features of a record in its order, one array after the other; errors as of :func:`.verify`.

    The folder has ``query.fasta`` and alignments with AlphaFold's names; for a complex in a folder ``A``, ``B``, … for
    each chain, and hits for templates in ``template_db``, next to the folder above. Template arrays of one chain, a
    single empty template, and ``domain_name``, a copy of the header, are skipped.
    """
    directory = directory.resolve()
    check_present(directory / _QUERY)
    (target,) = read_fasta(directory / _QUERY, complex_=True)
    is_complex = "asym_id" in expected
    msas = _alignments(directory, target.chains, is_complex)
    if is_complex:
        templates = None
        if expected["template_all_atom_mask"].any():
            templates = _templates(directory.parent.parent / "template_db", target.chains, msas)
        ours = multimer_features(target.chains, msas, templates)
        if _PAIRED_ROWS in expected:
            raw = [monomer_features(one, pair[1]) for one, pair in zip(target.chains, msas, strict=True)]
            order = chain_order([chain.sequence for chain in target.chains])
            ours[_PAIRED_ROWS] = paired_lines([raw[index] for index in order], in_lines=False)
    else:
        (unpaired, paired), chain = msas[0], target.chains[0]
        ours = monomer_features(chain, unpaired)
        ours |= {f"uniprot/{name}": value for name, value in monomer_features(chain, paired).items()}
        ours["sequence"] = np.array([ours["sequence"].tobytes()])
        ours["rows_parsed"] = np.array([len(msa.sequences) for msa in unpaired])
    for name, value in expected.items():
        if name.startswith("stable/") or name == "domain_name":
            continue
        if not is_complex and (name.startswith("template_") or name == "num_templates"):
            continue
        if name not in ours:
            raise InputError(f"unknown array {name!r}", path=directory / EXPECTED)
        if not np.array_equal(ours[name], value):
            value = expected.get(f"stable/{name}", value)
        yield RecordedArray(name, ours[name], value)


def _alignments(directory: Path, chains: tuple[Chain, ...], is_complex: bool) -> list[ChainMsas]:
    if next(directory.rglob("*_hits.*"), None) is None:
        message = "contains no alignments of the query (*_hits.sto, *_hits.a3m); run their script first if it exists"
        raise MissingInputError(message, path=directory)
    alignments: dict[str, ChainMsas] = {}
    for chain in chains:
        if chain.sequence in alignments:
            continue
        files = find_alignments(directory.parent, directory.name, chain=chain if is_complex else None)
        inputs = [path for path in files.unpaired if not path.name.startswith("expected")]
        alignments[chain.sequence] = (
            [read_alignment(path, query=chain.sequence) for path in inputs],
            [read_alignment(path, query=chain.sequence) for path in files.paired],
        )
    return [alignments[chain.sequence] for chain in chains]


def _templates(
    database: Path, chains: tuple[Chain, ...], msas: list[ChainMsas]
) -> list[dict[str, np.ndarray]]:
    """Compute template features of each chain, from hmmsearch hits of its first (UniRef90) alignment."""
    with TemporaryDirectory() as folder:
        unpack_entries(database / "mmcif.tar.gz", Path(folder))
        entries = MmcifFolder(folder, obsolete=database / "obsolete.dat", official_errors=True)
        features = {}
        date_limit = date.fromisoformat(TEMPLATE_DATE)
        for chain, (unpaired, _) in zip(chains, msas, strict=True):
            hits = parse_hmmsearch(hmmsearch(unpaired[0], database / "pdb_seqres.txt"), chain.sequence)
            chosen = choose_templates(hits, chain.sequence, entries, max_date=date_limit)
            features[chain.sequence] = chosen.features()
    return [features[chain.sequence] for chain in chains]
