"""FASTA files: records, and the targets that they name.

A record is one target; ``:`` in its sequence joins the chains of a complex. With ``complex_`` all records of
a file are the chains of one complex, which is called after the file. Files may be compressed if their name
ends in ``.gz``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from fastfold.data.targets import Chain, Target, make_chains, parse_sequence, safe_stem, unique_stems
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

MAX_FASTA_BYTES = 1 << 28


class FastaRecord(NamedTuple):
    """One record as it stands in the file.

    Attributes:
        header: The header without its ``>``.
        line: Line number of the header, from 1.
        lines: The lines below it, up to the next header.
    """

    header: str
    line: int
    lines: list[str]


def split_records(text: str) -> tuple[list[str], list[FastaRecord]]:
    """The lines above the first header, and the records, of text in FASTA's or A3M's form."""
    lines = split_lines(text)
    starts = [i for i, line in enumerate(lines) if line.startswith(">")]
    records = [
        FastaRecord(lines[i][1:].strip(), i + 1, lines[i + 1 : end])
        for i, end in zip(starts, [*starts[1:], len(lines)], strict=False)
    ]
    return lines[: starts[0]] if starts else lines, records


def read_fasta(path: PathLike, *, complex_: bool = False) -> list[Target]:
    """The targets of one FASTA file, with names that are unique among them.

    Args:
        path: The file.
        complex_: All records are the chains of one complex, called after the file.

    Raises:
        InputError: The first thing in the file that cannot be used, with its line and record.
    """
    targets, errors = read_targets([path], complex_=complex_)
    if errors:
        raise errors[0]
    return targets


def read_targets(
    paths: Iterable[PathLike], *, complex_: bool = False
) -> tuple[list[Target], list[InputError]]:
    """The targets of several FASTA files, and everything in them that cannot be used.

    A bad record never keeps the others from being read, nor does a bad file.

    Args:
        paths: The files.
        complex_: The records of each file are the chains of one complex, called after the file.

    Returns:
        The usable targets in the order of the input, with unique names, and one error for each bad file or
        record; an identifier that was used before is an error too.
    """
    targets: list[Target] = []
    errors: list[InputError] = []
    places: dict[str, str] = {}
    for path in paths:
        try:
            records = _records(path, errors)
        except InputError as error:
            errors.append(error)
            continue
        if complex_ and len(records) > 1:
            found = _complex_target(path, records, errors)
        else:
            found = _single_targets(path, records, errors)
        for line, target in found:
            if target.record in places:
                message = f"the identifier was used before, at {places[target.record]}; rename one of the two"
                errors.append(InputError(message, path=path, line=line, record=target.record))
                continue
            places[target.record] = f"{target.source}:{line}"
            targets.append(target)
    names = unique_stems([target.record for target in targets])
    return [replace(target, name=name) for target, name in zip(targets, names, strict=True)], errors


def _records(path: PathLike, errors: list[InputError]) -> list[FastaRecord]:
    """The records of a file; text above the first header is added to ``errors``."""
    # Surrogates keep bytes that are not ASCII apart until the line that they stand in can be named.
    text = read_text_bytes(path, limit=MAX_FASTA_BYTES).decode("ascii", "surrogateescape")
    preamble, records = split_records(text)
    stray = next((i for i, line in enumerate(preamble) if line.strip()), None)
    if stray is not None:
        message = "text without a header; put a line such as '>my_protein' above the sequence"
        errors.append(InputError(message, path=path, line=stray + 1))
    elif not records:
        raise InputError("is empty; a FASTA file has a line '>name' and then the sequence", path=path)
    return records


def _single_targets(
    path: PathLike, records: list[FastaRecord], errors: list[InputError]
) -> list[tuple[int, Target]]:
    """One target per record, with the line of its header."""
    targets = []
    for number, record in enumerate(records, 1):
        try:
            identifier, sequences, warnings = _parse_record(path, number, record)
        except InputError as error:
            errors.append(error)
            continue
        targets.append((record.line, _target(path, identifier, make_chains(sequences), warnings)))
    return targets


def _complex_target(
    path: PathLike, records: list[FastaRecord], errors: list[InputError]
) -> list[tuple[int, Target]]:
    """The target whose chains are all records, with the line of the first header; none if one is bad."""
    sequences: list[str] = []
    identifiers: list[str] = []
    warnings: list[str] = []
    num_errors = len(errors)
    for number, record in enumerate(records, 1):
        try:
            identifier, found, doubts = _parse_record(path, number, record)
        except InputError as error:
            errors.append(error)
            continue
        sequences += found
        identifiers += [identifier if len(found) == 1 else ""] * len(found)
        warnings += (f"record {identifier!r}: {doubt}" for doubt in doubts)
    if len(errors) > num_errors:
        return []
    name = _file_stem(path)
    return [(records[0].line, _target(path, name, make_chains(sequences, identifiers), warnings))]


def _target(path: PathLike, identifier: str, chains: tuple[Chain, ...], warnings: list[str]) -> Target:
    """A target whose name is yet to be made unique."""
    return Target(safe_stem(identifier), chains, os.fspath(path), identifier, tuple(warnings))


def _parse_record(path: PathLike, number: int, record: FastaRecord) -> tuple[str, list[str], list[str]]:
    """Identifier, chains and warnings of the record that is the ``number``-th of its file."""
    if not record.header.isascii():
        message = "the header is not ASCII; write it in plain letters"
        shown = record.header.encode("ascii", "backslashreplace").decode()
        raise InputError(message, path=path, line=record.line, record=shown)
    words = record.header.split()
    identifier = words[0] if words else f"{_file_stem(path)}_{number}"
    sequences, warnings = parse_sequence(
        record.lines, path=path, record=identifier, first_line=record.line + 1
    )
    if not words:
        warnings.insert(0, f"the header on line {record.line} has no name; it is called {identifier!r}")
    return identifier, sequences, warnings


def _file_stem(path: PathLike) -> str:
    name = PurePath(path).name
    if name.lower().endswith(".gz"):
        name = name[:-3]
    return PurePath(name).stem or "targets"
