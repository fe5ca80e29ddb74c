"""A3M as a query: one target, whose sequence is the first row, with its alignment.

ColabFold's first line ``#12,10<tab>2,1`` makes it a complex: chains of 12 and 10 residues, two copies of the first.
Rows are used as in ColabFold 1.6.3: repeated rows are kept.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fastfold.data.fasta import file_stem
from fastfold.data.msa.colabfold import parse_colabfold
from fastfold.data.msa.msa import ChainMsas, a3m_records, colabfold_header, parse_a3m
from fastfold.data.targets import FoundTarget, Target, make_chains, parse_sequence, safe_stem
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, read_text_bytes

MAX_A3M_BYTES = 1 << 32
MAX_CHAINS = 1000
"""Largest number of chains of a complex, including copies; a larger number is considered a mistake."""


def parse_a3m_query(data: bytes, path: PathLike) -> FoundTarget:
    """Parse the target of an A3M file, which has the file's name.

    Raises:
        InputError: The content is not an alignment of one query, or of ColabFold's complexes.
    """
    # Descriptions may hold any characters; invalid residues are refused in their row.
    text = data.decode("utf-8", "replace")
    _check_query(text, path)
    header = colabfold_header(text, path=path)
    warnings: list[str] = []
    alignments: list[ChainMsas]
    if header is None:
        msa = replace(parse_a3m(text, path=path), as_is=True)
        sequences, alignments = [msa.sequences[0]], [([msa], [])]
    else:
        if sum(header.copies) > MAX_CHAINS:
            message = f"the first line announces {sum(header.copies):,} chains, more than {MAX_CHAINS:,}; correct it"
            raise InputError(message, path=path, line=1)
        parts, warnings = parse_colabfold(text, path=path)
        sequences = [part.query for part in parts for _ in range(part.copies)]
        alignments = [msas for part in parts for msas in [part.msas] * part.copies]
    name = file_stem(path)
    sequences, doubts = parse_sequence([":".join(sequences)], path=path, record=name)
    target = Target(
        name=safe_stem(name),
        chains=make_chains(sequences),
        source=os.fspath(path),
        record=name,
        warnings=(*doubts, *warnings),
        alignments=tuple(alignments),
    )
    return FoundTarget(target, path, 1)


def add_alignments(found: FoundTarget, place: str) -> FoundTarget:
    """Return a target of another file with the alignments of an A3M.

    Args:
        found: The target.
        place: Path of the A3M, from the folder of the other file.

    Raises:
        InputError: The A3M is invalid, or see :func:`alignments_of`.
    """
    path = Path(found.path).parent / place
    theirs = parse_a3m_query(read_text_bytes(path, limit=MAX_A3M_BYTES), path)
    target = found.target
    sequences = [chain.letters or chain.sequence for chain in target.chains]
    alignments = alignments_of(theirs, sequences, found.path)
    warnings = (*target.warnings, *(f"{place}: {warning}" for warning in theirs.target.warnings))
    return found._replace(target=replace(target, alignments=alignments, warnings=warnings))


def alignments_of(found: FoundTarget, sequences: list[str], path: PathLike) -> tuple[ChainMsas, ...]:
    """Return the alignments of an A3M for a target defined in another file.

    Args:
        found: Target of the A3M.
        sequences: Sequences of the other target's chains.
        path: Path of the other target, in errors.

    Returns:
        Alignments per chain of the other target, in its order.

    Raises:
        InputError: The A3M has other chains, or another number of them.
    """
    theirs = found.target
    chains = make_chains(sequences)
    if sorted(c.sequence for c in chains) != sorted(c.sequence for c in theirs.chains):
        lengths = [", ".join(str(len(c.sequence)) for c in of) for of in (theirs.chains, chains)]
        raise InputError(
            f"its chains, of {lengths[0]} residues, differ from those of {os.fspath(path)!r}, of {lengths[1]}; give "
            "the alignment of this target",
            path=theirs.source,
        )
    of_sequence = {c.sequence: msas for c, msas in zip(theirs.chains, theirs.alignments or (), strict=True)}
    return tuple(of_sequence[chain.sequence] for chain in chains)


def _check_query(text: str, path: PathLike) -> None:
    """Refuse a query with lower-case letters, which A3M does not count as residues of the query."""
    record = a3m_records(text, path=path)[0][0]
    low = next((c for line in record.lines for c in line if c.islower()), None)
    if low is not None:
        raise InputError(
            f"the query, the first row, has {low!r} in lower case, which A3M leaves out; write its residues in upper "
            "case",
            path=path,
            line=record.line,
            record=record.header,
        )
