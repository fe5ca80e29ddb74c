"""A3M files and tables as queries.

An A3M is one target, whose sequence is the first row, with its alignment. ColabFold's first line ``#12,10<tab>2,1``
makes it a complex: chains of 12 and 10 residues, two copies of the first. Rows are used as in ColabFold 1.6.3: repeated
rows are kept.

A table is CSV or TSV with the columns ``id`` and ``sequence``, and ``a3mpath`` for alignments. ``:`` in a sequence
joins the chains of a complex. Other columns are ignored, unless they name alignments.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fastfold.data.msa.formats import parse_colabfold
from fastfold.data.msa.msa import ChainMsas, a3m_records, colabfold_header, parse_a3m
from fastfold.data.queries.records import QueryFile, Record
from fastfold.data.targets import parse_sequence
from fastfold.errors import InputError
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.foreign_text import table_cells, table_delimiter, table_rows
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

MAX_A3M_BYTES = 1 << 32
MAX_CHAINS = 1000
"""Largest number of chains of a complex, including copies; a larger number is considered a mistake."""


def parse_a3m_query(file: QueryFile) -> Record:
    """Parse the only record of an A3M file, which has the file's name and its alignments.

    Raises:
        InputError: The content is not an alignment of one query, or of ColabFold's complexes.
    """
    path = file.path
    # Descriptions may hold any characters; invalid residues are refused in their row.
    text = file.data.decode("utf-8", "replace")
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
    sequences, doubts = parse_sequence([":".join(sequences)], path=path, record=file.stem)
    return Record(file.stem, 1, sequences, [*doubts, *warnings], alignments=tuple(alignments), is_named=False)


def add_alignments(record: Record, path: PathLike, place: str) -> Record:
    """Return a record of another file with the alignments of an A3M, in the order of the record's chains.

    ``place`` is the path of the A3M from the folder of the record's file, which is at ``path``.

    Raises:
        InputError: The A3M is invalid, or has other chains, or another number of them.
    """
    a3m = Path(path).parent / place
    theirs = parse_a3m_query(QueryFile(a3m, read_text_bytes(a3m, limit=MAX_A3M_BYTES)))
    chains, known = ([mask_unknown(s) for s in one.sequences] for one in (record, theirs))
    if sorted(chains) != sorted(known):
        lengths = [", ".join(str(len(sequence)) for sequence in one) for one in (known, chains)]
        raise InputError(
            f"its chains, of {lengths[0]} residues, differ from those of {os.fspath(path)!r}, of {lengths[1]}; give "
            "the alignment of this target",
            path=a3m,
        )
    of_sequence = dict(zip(known, theirs.alignments or (), strict=True))
    return record._replace(
        alignments=tuple(of_sequence[sequence] for sequence in chains),
        warnings=[*record.warnings, *(f"{place}: {warning}" for warning in theirs.warnings)],
    )


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


_COLUMNS = ("id", "sequence")
_ALIGNMENT = "a3mpath"
_ALIGNMENT_ENDINGS = (".a3m", ".sto")


def parse_table(file: QueryFile) -> Iterator[Record | InputError]:
    """Yield the record of each row of a table, or its error; relative paths of alignments start at its folder.

    Raises:
        InputError: The column names are missing, or there are no rows.
    """
    text = file.data.decode("utf-8", "surrogateescape")
    rows = table_rows(text, file.path, table_delimiter(text))
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    if not all(header.count(name) == 1 for name in _COLUMNS) or header.count(_ALIGNMENT) > 1:
        raise InputError(
            "the first line must name the columns, 'id' and 'sequence' among them, each once",
            path=file.path,
            line=rows[0][0] if rows else None,
        )
    if len(rows) == 1:
        raise InputError(
            "the table contains no row after the column names; add one per target", path=file.path
        )
    for number, (line, cells) in enumerate(rows[1:], 1):
        try:
            yield _record(file, number, line, header, cells)
        except InputError as error:
            yield error


def _record(file: QueryFile, number: int, line: int, header: Sequence[str], cells: Sequence[str]) -> Record:
    """Parse the ``number``-th row of a file."""
    row = table_cells(header, cells, path=file.path, line=line)
    identifier = row["id"].strip()
    name = identifier or f"{file.stem}_{number}"
    text = row["sequence"]
    if not text.strip():
        message = "lacks a sequence; write its residues or remove the row"
        raise InputError(message, path=file.path, line=line, record=name)
    # A sequence may be wrapped within its quotes; its first line is usually that of the row.
    sequences, warnings = parse_sequence(split_lines(text), path=file.path, record=name, first_line=line)
    if not identifier:
        warnings.insert(0, f"line {line} lacks an id; it is named {name!r}")
    record = Record(name, line, sequences, warnings, is_named=bool(identifier))
    for column, cell in row.items():
        if column != _ALIGNMENT and cell.strip().lower().removesuffix(".gz").endswith(_ALIGNMENT_ENDINGS):
            raise InputError(
                f"the column {column[:40]!r} names an alignment, which only {_ALIGNMENT!r} does; rename the column",
                path=file.path,
                line=line,
                record=name,
            )
    place = row.get(_ALIGNMENT, "").strip()
    return add_alignments(record, file.path, place) if place else record
