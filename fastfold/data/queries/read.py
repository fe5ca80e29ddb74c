"""Read queries in all formats: FASTA, A3M, CSV, JSON, YAML, folders of these, and standard input.

The suffix determines the format: ``.a3m`` is one target with its alignment, ``.csv`` and ``.tsv`` are tables, ``.json``
and ``.yaml`` are inputs of AlphaFold 3, Boltz and others, and the rest is FASTA; ``.gz`` may follow. The format of
standard input is detected from its beginning. JSON and YAML files must be named; those in folders are ignored.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from fastfold.data.queries.accessions import UNIPROT, accessions_of, fetch_sequence, refuse_download
from fastfold.data.queries.entities import ENTITY_ENDINGS, MAX_ENTITY_BYTES, parse_entities
from fastfold.data.queries.fasta import MAX_FASTA_BYTES, parse_fasta
from fastfold.data.queries.formats import MAX_A3M_BYTES, parse_a3m_query, parse_table
from fastfold.data.queries.records import QueryFile, Record, file_stem, targets_of_records
from fastfold.data.targets import FoundTarget, Target, unique_targets
from fastfold.errors import InputError
from fastfold.utils.text_files import STDIN_NAME, PathLike, check_listed, read_stdin_bytes, read_text_bytes

TargetReader = Callable[[], tuple[list[Target], list[InputError]]]
"""Function that reads targets with unique names, and collects an error for each bad input."""

STDIN = "-"
FASTA_ENDINGS = (".fasta", ".fa", ".faa", ".fas")
TABLE_ENDINGS = (".csv", ".tsv")
A3M_ENDING = ".a3m"

_HEADER_LINE = re.compile(rb"\s*#[0-9]+(,[0-9]+)*[ \t]+[0-9]")
_BARE_SEQUENCE = re.compile(r"[A-Z]{10,}(:[A-Z]+)*")
_FIRST_LINE = re.compile(rb"\s*([^\r\n]*)")


def read_targets(
    inputs: Iterable[PathLike], *, complex_: bool = False, allow_download: bool = False
) -> tuple[list[Target], list[InputError]]:
    """Read the targets of several inputs, with unique names, and collect all errors.

    A bad record or file does not affect the others.

    Args:
        inputs: Files, folders of files (without subfolders), ``-`` for standard input, sequences in capitals, or
            accessions of UniProt and ids of AlphaFold DB.
        complex_: Join the records of each FASTA file or table to one complex, which has the file's name.
        allow_download: Download the sequences of accessions; otherwise each is an error.

    Returns:
        The valid targets in the order of the input, files of a folder by name; and one error for each bad file or
        record. Records of several files with equal identifiers are named after their files. An identifier repeated in a
        file is an error.
    """
    targets: list[FoundTarget] = []
    errors: list[InputError] = []
    for path in _files(inputs, errors):
        try:
            if accessions := accessions_of(path):
                if not allow_download:
                    raise refuse_download(path)
                letters = ":".join(map(fetch_sequence, accessions))
                note = f"the sequence was downloaded from {UNIPROT}"
                targets += _sequence_target("_".join(accessions), letters, note, errors)
            else:
                targets += _read_input(path, errors, complex_)
        except InputError as error:
            errors.append(error)
    return unique_targets(_named_by_files(targets), errors), errors


def _named_by_files(targets: list[FoundTarget]) -> list[FoundTarget]:
    """Rename records that several files contain after their files, as ColabFold does."""
    files: dict[str, set[str]] = {}
    records: dict[str, int] = {}
    for one in targets:
        files.setdefault(one.target.record, set()).add(os.path.realpath(one.path))
        records[os.fspath(one.path)] = records.get(os.fspath(one.path), 0) + 1

    def renamed(one: FoundTarget) -> FoundTarget:
        record = one.target.record
        if len(files[record]) < 2:
            return one
        stem = file_stem(one.path)
        name = stem if records[os.fspath(one.path)] == 1 else f"{stem}_{record}"
        doubt = f"other files have a record {record!r} too; this one is named {name!r}"
        return one._replace(target=replace(one.target, record=name, warnings=(*one.target.warnings, doubt)))

    return [renamed(one) for one in targets]


def _files(inputs: Iterable[PathLike], errors: list[InputError]) -> Iterator[PathLike]:
    """Yield the inputs, with each folder replaced by its queries."""
    for path in inputs:
        try:
            is_folder = os.fspath(path) != STDIN and os.path.isdir(path)
            files = sorted(Path(path).iterdir()) if is_folder else None
        except (OSError, ValueError) as error:
            errors.append(InputError(f"cannot be listed: {error}", path=path))
            continue
        if files is None:
            yield path
            continue
        endings = (*FASTA_ENDINGS, A3M_ENDING, *TABLE_ENDINGS)
        queries = [
            file
            for file in files
            if not file.name.startswith(".") and file_ending(file) in endings and not file.is_dir()
        ]
        if not queries:
            message = f"is a folder without a query ({', '.join(endings)}, or .gz)"
            errors.append(InputError(message, path=path))
        for file in queries:
            try:
                check_listed(file)
            except InputError as error:
                errors.append(error)
            else:
                yield file


def is_bare_sequence(path: PathLike) -> bool:
    """Return True for an input that is not a file but the letters of a protein, with ``:`` between chains."""
    return _BARE_SEQUENCE.fullmatch(os.fspath(path)) is not None and not os.path.exists(path)


def file_ending(path: PathLike) -> str:
    """Return the suffix of a file's name in lower case, without ``.gz``."""
    return os.path.splitext(os.fspath(path).lower().removesuffix(".gz"))[1]


def _read_input(path: PathLike, errors: list[InputError], complex_: bool) -> list[FoundTarget]:
    if is_bare_sequence(path):
        letters = os.fspath(path)
        name = f"sequence_{hashlib.sha256(letters.encode()).hexdigest()[:5]}"
        return _sequence_target(
            name, letters, f"no file is called {letters:.20}, which is read as a sequence", errors
        )
    if os.fspath(path) == STDIN:
        file = QueryFile(STDIN_NAME, read_stdin_bytes(limit=MAX_A3M_BYTES))
        ending = _ending_of_content(file.data)
    else:
        ending = file_ending(path)
        limits = {A3M_ENDING: MAX_A3M_BYTES, **dict.fromkeys(ENTITY_ENDINGS, MAX_ENTITY_BYTES)}
        limit = limits.get(ending, MAX_FASTA_BYTES)
        file = QueryFile(path, read_text_bytes(path, limit=limit))
    records: Iterable[Record | InputError]
    if ending in TABLE_ENDINGS:
        records = parse_table(file)
    elif ending == A3M_ENDING:
        records = [parse_a3m_query(file)]
    elif ending in ENTITY_ENDINGS:
        records, complex_ = parse_entities(file), False  # each of them is a whole complex
    else:
        records = parse_fasta(file)
    return targets_of_records(records, file, errors, complex_=complex_)


def _sequence_target(name: str, letters: str, note: str, errors: list[InputError]) -> list[FoundTarget]:
    """Return the target of a sequence, with ``:`` between chains and a note about its origin."""
    file = QueryFile("sequence", f">{name}\n{letters}\n".encode())
    return [
        one._replace(target=replace(one.target, warnings=(*one.target.warnings, note)))
        for one in targets_of_records(parse_fasta(file), file, errors)
    ]


def _ending_of_content(data: bytes) -> str:
    """Return the suffix of files with such content."""
    if _HEADER_LINE.match(data):
        return A3M_ENDING
    first = _FIRST_LINE.match(data)
    words = first.group(1).lower() if first else b""
    if b"sequence" in words and not words.startswith(b">"):
        return ".csv"
    return ".fasta"
