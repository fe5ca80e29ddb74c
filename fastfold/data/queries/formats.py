"""A3M files, tables, and inputs of AlphaFold 3 and Boltz as queries.

An A3M is one target, whose sequence is the first row, with its alignment. ColabFold's first line ``#12,10<tab>2,1``
makes it a complex: chains of 12 and 10 residues, two copies of the first. Rows are used as in ColabFold 1.6.3: repeated
rows are kept.

A table is CSV or TSV with the columns ``id`` and ``sequence``, and ``a3mpath`` for alignments. ``:`` in a sequence
joins the chains of a complex. Other columns are ignored.

Inputs of AlphaFold 3 and Boltz are JSON and YAML files that list the molecules of one complex. Those with only protein
chains are read. Ligands, nucleic acids, modified residues, bonds, constraints and templates are refused, because a fold
without them would answer another question.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fastfold.data.msa.formats import parse_colabfold
from fastfold.data.msa.msa import ChainMsas, a3m_records, colabfold_header, parse_a3m
from fastfold.data.queries.records import QueryFile, Record
from fastfold.data.targets import mask_unknown, parse_sequence
from fastfold.errors import InputError
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


_DELIMITERS = (",", "\t", ";")
_COLUMNS = ("id", "sequence")
_ALIGNMENT = "a3mpath"


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


def table_delimiter(text: str) -> str:
    """Return the separator of a table, the one that splits its first line into the most columns.

    Spreadsheets write ``;`` or tabs into ``.csv`` files.
    """
    first = next((line for line in split_lines(text) if line.strip()), "")
    return max(_DELIMITERS, key=first.count)


def table_rows(text: str, path: PathLike, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, with the line where each begins."""
    reader = csv.reader((line + "\n" for line in split_lines(text)), delimiter=delimiter, strict=True)
    rows = []
    line = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"is not a table: {error}; check the quotes", path=path, line=line) from None
    return rows


def table_cells(header: Sequence[str], cells: Sequence[str], *, path: PathLike, line: int) -> dict[str, str]:
    """Return the cells of a row by the column's name; refuse another number of cells than of columns."""
    if len(cells) != len(header):
        raise InputError(
            f"has {len(cells)} columns, the first line names {len(header)}; quote cells that contain the separator",
            path=path,
            line=line,
        )
    return dict(zip(header, cells, strict=True))


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
    place = row.get(_ALIGNMENT, "").strip()
    return add_alignments(record, file.path, place) if place else record


ENTITY_ENDINGS = (".json", ".yaml", ".yml")

_PROTEINS = ("protein", "proteinChain")
_MEANINGFUL = ("bondedAtomPairs", "userCCD", "userCCDPath", "constraints", "templates", "properties")
"""Keys that change the meaning of a file."""
_OF_CHAIN = ("modifications", "templates", "cyclic", "glycans")
_ALIGNMENTS = ("msa", "unpairedMsa", "pairedMsa", "unpairedMsaPath", "pairedMsaPath")
_MAX_COPIES = 1000


def parse_entities(file: QueryFile) -> Iterator[Record | InputError]:
    """Yield each complex of a JSON or YAML file of AlphaFold 3, its server, or Boltz, or its error.

    Most files have one, those of AlphaFold's server several.

    Raises:
        InputError: The content is neither JSON nor YAML, or not such an input.
    """
    tree = _parsed(file)
    jobs = tree if isinstance(tree, list) else [tree]
    if not jobs:
        raise InputError("the list contains no complex; add one", path=file.path)
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, Mapping) or not isinstance(job.get("sequences"), list) or not job["sequences"]:
            raise InputError(
                "expected an input of AlphaFold 3 or Boltz with a list 'sequences', found other content; FASTA files "
                "end in .fasta, tables in .csv",
                path=file.path,
            )
        given = str(job.get("name") or "").strip()
        name = given or file.stem + (f"_{number}" if len(jobs) > 1 else "")
        try:
            yield _complex_record(job, name, file.path)._replace(is_named=bool(given))
        except InputError as error:
            yield error


def _parsed(file: QueryFile) -> Any:
    try:
        text = file.data.decode("utf-8-sig")
        if Path(str(file.path).removesuffix(".gz")).suffix.lower() == ".json":
            return json.loads(text)
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"cannot be read: {message}; check the file's syntax", path=file.path) from None


def _complex_record(job: Mapping[str, Any], name: str, path: PathLike) -> Record:
    fail = partial(InputError, path=path, record=name)
    _refuse(job, _MEANINGFUL, fail)
    sequences: list[str] = []
    chains: list[str] = []
    warnings = []
    if job.get("modelSeeds"):
        warnings.append("the seeds of the file are ignored; give them with --seeds")
    for number, entity in enumerate(job["sequences"], 1):
        content = _protein(entity, number, fail)
        (sequence, *more), doubts = parse_sequence(split_lines(content["sequence"]), path=path, record=name)
        if more:
            raise fail(f"entry {number} has ':' in its sequence; list each chain")
        if any(content.get(key) not in (None, "", "empty") for key in _ALIGNMENTS):
            doubts.append("alignments named in the file are ignored; give them with --msa-dir")
        names = _copies(content, number, fail)
        sequences += [sequence] * len(names)
        chains += names
        warnings += [doubt for doubt in doubts if doubt not in warnings]
    return Record(name, 1, sequences, warnings, chains)


def _protein(entity: Any, number: int, fail: Callable[[str], InputError]) -> Mapping[str, Any]:
    """Return the content of an entity that is a protein."""
    if not isinstance(entity, Mapping) or len(entity) != 1:
        raise fail(f"entry {number} of 'sequences' must have a single kind of molecule")
    ((kind, content),) = entity.items()
    if kind not in _PROTEINS:
        raise fail(
            f"expected only proteins, found {str(kind)[:40]!r} as entry {number}; FastFold folds proteins: remove it "
            "from the file"
        )
    if not isinstance(content, Mapping) or not isinstance(content.get("sequence"), str):
        raise fail(f"entry {number} lacks a text 'sequence'")
    _refuse(content, _OF_CHAIN, fail)
    return content


def _copies(content: Mapping[str, Any], number: int, fail: Callable[[str], InputError]) -> list[str]:
    """Return the name of each copy of a protein, empty for copies without names."""
    given = content.get("id", content.get("count", 1))
    count = given if isinstance(given, int) else len(given) if isinstance(given, list) else 1
    if not 1 <= count <= _MAX_COPIES:
        raise fail(f"entry {number} has {count} copies, expected 1 to {_MAX_COPIES}")
    if isinstance(given, list):
        return [str(copy) for copy in given]
    return [""] * count if isinstance(given, int) else [str(given)]


def _refuse(content: Mapping[str, Any], keys: tuple[str, ...], fail: Callable[[str], InputError]) -> None:
    for key in keys:
        if content.get(key):
            raise fail(
                f"has {key!r}, which FastFold does not support in such files; remove it to fold only the chains"
            )
