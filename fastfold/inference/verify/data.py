"""Compare the data pipeline with recorded runs of AlphaFold."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fastfold.data.features.assembly import monomer_features, multimer_features
from fastfold.data.features.merging import chain_order, paired_lines
from fastfold.data.msa.find import find_alignments, read_hits
from fastfold.data.msa.msa import ChainMsas
from fastfold.data.queries.fasta import read_fasta
from fastfold.data.targets import Chain
from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.hits import parse_hmmsearch
from fastfold.data.templates.search import hmmsearch
from fastfold.data.templates.select import choose_templates
from fastfold.errors import InputError
from fastfold.inference.verify.recorded_array import MissingInputError, RecordedArray, check_present
from fastfold.inference.verify.templates import TEMPLATE_DATE, unpack_entries

EXPECTED = "expected.npz"  #: File that identifies such a record

_QUERY = "query.fasta"
_PAIRED_ROWS = "debug/paired_rows"


def compute_recorded(directory: Path, expected: dict[str, np.ndarray]) -> Iterator[RecordedArray]:
    """Compute the features of a record in its order, one array after the other; errors as of :func:`.verify`.

    The folder has ``query.fasta`` and alignments with AlphaFold's names; for a complex in a folder ``A``, ``B``, … for
    each chain. For a complex recorded with templates, hits are searched in ``template_db``, next to the folder above.
    Template arrays are skipped for a record of one chain, whose single empty template FastFold leaves out.
    ``domain_name``, a copy of the header, is skipped too.
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
            ours[_PAIRED_ROWS] = _paired_rows(target.chains, msas)
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
    """Read the alignments of each chain; equal chains share the first one's folder."""
    if next(directory.rglob("*_hits.*"), None) is None:
        message = "contains no alignments of the query (*_hits.sto, *_hits.a3m); run their script first if it exists"
        raise MissingInputError(message, path=directory)
    found: dict[str, ChainMsas] = {}
    for chain in chains:
        if chain.sequence in found:
            continue
        asked = chain if is_complex else None
        files = find_alignments(directory.parent, directory.name, chain=asked)
        inputs = [path for path in files.unpaired if not path.name.startswith("expected")]
        found[chain.sequence] = (
            [read_hits(path, query=chain.sequence) for path in inputs],
            [read_hits(path, query=chain.sequence) for path in files.paired],
        )
    return [found[chain.sequence] for chain in chains]


def _templates(
    database: Path, chains: tuple[Chain, ...], msas: list[ChainMsas]
) -> list[dict[str, np.ndarray]]:
    """Compute template features of each chain, from hmmsearch hits of its first (UniRef90) alignment."""
    with TemporaryDirectory() as folder:
        unpack_entries(database / "mmcif.tar.gz", Path(folder))
        entries = MmcifFolder(folder, obsolete=database / "obsolete.dat", official_errors=True)
        found = {}
        date_limit = date.fromisoformat(TEMPLATE_DATE)
        for chain, (unpaired, _) in zip(chains, msas, strict=True):
            hits = parse_hmmsearch(hmmsearch(unpaired[0], database / "pdb_seqres.txt"), chain.sequence)
            chosen = choose_templates(hits, chain.sequence, entries, max_date=date_limit)
            found[chain.sequence] = chosen.features()
    return [found[chain.sequence] for chain in chains]


def _paired_rows(chains: tuple[Chain, ...], msas: list[ChainMsas]) -> np.ndarray:
    """Return the row of each chain's UniProt alignment in each paired line, ``[P, chains]``, -1 for none."""
    raw = [monomer_features(chain, pair[1]) for chain, pair in zip(chains, msas, strict=True)]
    order = chain_order([chain.sequence for chain in chains])
    return paired_lines([raw[index] for index in order], in_lines=False)
