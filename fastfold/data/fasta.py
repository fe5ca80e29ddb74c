"""FASTA files: records, and their targets.

A record is one target; ``:`` in its sequence joins the chains of a complex. With ``complex_`` all records of a file are
the chains of one complex, which has the file's name. Lines that begin with ``#`` are comments. Files with suffix
``.gz`` may be compressed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

from fastfold.data.targets import FoundTarget, Target, make_chains, parse_sequence, safe_stem, unique_targets
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

MAX_FASTA_BYTES = 1 << 28

_OTHER_MOLECULES = ("ccd", "smiles", "dna", "rna", "ligand", "glycan")
"""Kinds of other molecules, in the second field of a header of Boltz and the first of Chai."""
_PIR = re.compile(r"([A-Z][A-Z0-9]);(.*)")
_PIR_PROTEINS = ("P1", "F1")
_ALIGNMENT = re.compile(r"#[0-9]+(,[0-9]+)*[ \t]+[0-9]+(,[0-9]+)*[ \t]*$|# STOCKHOLM")


_INDENTED = re.compile(r"^[ \t]+>", re.MULTILINE)
_QUOTED = re.compile(r"^[ \t]*[\"']+[ \t]*>", re.MULTILINE)


class FastaRecord(NamedTuple):
    """Record of a FASTA file.

    Attributes:
        header: Header without its ``>``.
        line: Line number of the header, from 1.
        lines: Lines below it, up to the next header.
    """

    header: str
    line: int
    lines: list[str]


class Record(NamedTuple):
    """Parsed record of a file of sequences.

    Attributes:
        identifier: Name of the record.
        line: Line in the file, from 1.
        sequences: Its chains, upper case.
        warnings: Changes of the input, one sentence each.
    """

    identifier: str
    line: int
    sequences: list[str]
    warnings: list[str]


def split_records(text: str) -> tuple[list[str], list[FastaRecord]]:
    """Split text in FASTA or A3M into the lines above the first header, and the records."""
    lines = split_lines(text)
    starts = [i for i, line in enumerate(lines) if line.startswith(">")]
    records = [
        FastaRecord(lines[i][1:].strip(), i + 1, lines[i + 1 : end])
        for i, end in zip(starts, [*starts[1:], len(lines)], strict=False)
    ]
    return lines[: starts[0]] if starts else lines, records


def read_fasta(path: PathLike, *, complex_: bool = False) -> list[Target]:
    """Read the targets of one FASTA file, with unique names.

    Args:
        path: Path of the file.
        complex_: Join all records to one complex, which has the file's name.

    Raises:
        InputError: A record is invalid; the first one, with its line.
    """
    errors: list[InputError] = []
    found = parse_fasta(read_text_bytes(path, limit=MAX_FASTA_BYTES), path, errors, complex_=complex_)
    targets = unique_targets(found, errors)
    if errors:
        raise errors[0]
    return targets


def parse_fasta(
    data: bytes, path: PathLike, errors: list[InputError], *, complex_: bool = False
) -> list[FoundTarget]:
    """Parse the targets of a FASTA file.

    Args:
        data: Content of the file.
        path: Path in errors, and name of targets without one.
        errors: Receives an error for each invalid record.
        complex_: Join all records to one complex, which has the file's name.

    Raises:
        InputError: The file contains no record, or is an alignment.
    """
    # Surrogates keep bytes outside ASCII distinct until their line can be named.
    text = _INDENTED.sub(">", data.decode("ascii", "surrogateescape"))
    if quoted := _QUOTED.search(text):
        line = len(split_lines(text[: quoted.start()]))
        message = "a quotation mark precedes '>'; remove the quotation marks around the record"
        raise InputError(message, path=path, line=line)
    preamble, records = split_records(text)
    stray = next((i for i, line in enumerate(preamble) if line.strip() and not line.startswith("#")), None)
    first = next((i for i, line in enumerate(preamble) if line.strip()), None)
    if first is not None and _ALIGNMENT.match(preamble[first]):
        message = (
            "this is an alignment, not FASTA; rename it to .a3m to fold its query, or put it into a folder of "
            "alignments"
        )
        raise InputError(message, path=path, line=first + 1)
    if stray is not None:
        message = "text without a header; put a line such as '>my_protein' above the sequence"
        errors.append(InputError(message, path=path, line=stray + 1))
    elif not records:
        raise InputError("is empty; a FASTA file has a line '>name' and then the sequence", path=path)
    readers = [partial(_parse_record, path, number, record) for number, record in enumerate(records, 1)]
    return targets_of_records(readers, path, errors, complex_=complex_ and len(records) > 1)


def targets_of_records(
    readers: Iterable[Callable[[], Record]], path: PathLike, errors: list[InputError], *, complex_: bool
) -> list[FoundTarget]:
    """Build the targets of a file's records.

    Args:
        readers: Per record, a function that reads it, or raises :class:`InputError`.
        path: Path of the file.
        errors: Receives the errors of the functions.
        complex_: Join all records to one complex, which has the file's name; without a target if a record is invalid.
    """
    records = []
    num_errors = len(errors)
    for reader in readers:
        try:
            records.append(reader())
        except InputError as error:
            errors.append(error)
    if not complex_:
        return [
            found_target(path, record.line, record.identifier, record.sequences, warnings=record.warnings)
            for record in records
        ]
    if len(errors) > num_errors or not records:
        return []
    sequences = [sequence for record in records for sequence in record.sequences]
    names = [r.identifier if len(r.sequences) == 1 else "" for r in records for _ in r.sequences]
    warnings = [f"record {record.identifier!r}: {doubt}" for record in records for doubt in record.warnings]
    found = found_target(path, records[0].line, file_stem(path), sequences, warnings=warnings, records=names)
    return [found]


def found_target(
    path: PathLike,
    line: int,
    identifier: str,
    sequences: list[str],
    *,
    warnings: list[str],
    records: list[str] | None = None,
) -> FoundTarget:
    """Build a target of a file, whose name is not unique yet.

    Args:
        path: Path of the file.
        line: Line of its record.
        identifier: Name in the file.
        sequences: One per chain, upper case.
        warnings: Changes of the input.
        records: Per chain, the name of its record, if chains have separate ones.
    """
    chains = make_chains(sequences, records)
    target = Target(safe_stem(identifier), chains, os.fspath(path), identifier, tuple(warnings))
    return FoundTarget(target, path, line)


def file_stem(path: PathLike) -> str:
    """Return the name of a file without its folder, its extension and ``.gz``."""
    name = PurePath(path).name
    if name.lower().endswith(".gz"):
        name = name[:-3]
    return PurePath(name).stem or "targets"


def check_identifier(identifier: str, path: PathLike, line: int) -> None:
    """Refuse a name outside ASCII; the description after it may be anything.

    Raises:
        InputError: The name is not ASCII.
    """
    if identifier.isascii():
        return
    shown = identifier.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    message = "the name is not ASCII; write it in plain letters (the description after it may be anything)"
    record = shown.encode("ascii", "backslashreplace").decode()
    raise InputError(message, path=path, line=line, record=record)


def _parse_record(path: PathLike, number: int, record: FastaRecord) -> Record:
    pir = _PIR.fullmatch(record.header)
    words = (pir[2] if pir else record.header).split()
    identifier = words[0] if words else f"{file_stem(path)}_{number}"
    check_identifier(identifier, path, record.line)
    _check_protein(record, pir[1] if pir else None, identifier, path)
    lines = ["" if line.startswith("#") else line for line in record.lines]
    if pir and lines:
        lines[0] = ""  # title line of PIR
    sequences, warnings = parse_sequence(lines, path=path, record=identifier, first_line=record.line + 1)
    if not words:
        warnings.insert(
            0, f"the header on line {record.line} lacks a name; the record is named {identifier!r}"
        )
    return Record(identifier, record.line, sequences, warnings)


def _check_protein(record: FastaRecord, pir: str | None, identifier: str, path: PathLike) -> None:
    fields = [field.strip().lower() for field in record.header.split("|")]
    kind = fields[1] if len(fields) > 1 else ""
    if kind.startswith("name="):
        kind = fields[0]
    if kind in _OTHER_MOLECULES:
        found = kind
    elif pir is not None and pir not in _PIR_PROTEINS:
        found = f"PIR type {pir}"
    else:
        return
    raise InputError(
        f"expected a protein, found a record of another molecule ({found}); FastFold folds only proteins: remove the "
        "record",
        path=path,
        line=record.line,
        record=identifier,
    )
