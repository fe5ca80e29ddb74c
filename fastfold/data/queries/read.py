"""Queries of all forms: FASTA, A3M, CSV, folders of these, and the standard input.

What a file is follows from its name: ``.a3m`` is one target with its alignment, ``.csv`` and ``.tsv`` are tables, all
else is FASTA; ``.gz`` may follow. The standard input is what it begins like.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastfold.data.fasta import MAX_FASTA_BYTES, parse_fasta
from fastfold.data.queries.a3m import parse_a3m_query
from fastfold.data.queries.table import MAX_A3M_BYTES, parse_table
from fastfold.data.targets import FoundTarget, Target, unique_targets
from fastfold.errors import InputError
from fastfold.utils.text_files import STDIN_NAME, PathLike, read_stdin_bytes, read_text_bytes

STDIN = "-"
FASTA_ENDINGS = (".fasta", ".fa", ".faa", ".fas")
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
A3M_ENDING = ".a3m"

_HEADER_LINE = re.compile(rb"\s*#[0-9]+(,[0-9]+)*[ \t]+[0-9]")
_FIRST_LINE = re.compile(rb"\s*([^\r\n]*)")


def read_targets(
    inputs: Iterable[PathLike], *, complex_: bool = False
) -> tuple[list[Target], list[InputError]]:
    """The targets of several inputs, and everything in them that cannot be used.

    A bad record never keeps the others from being read, nor does a bad file.

    Args:
        inputs: Files, folders of files (without their subfolders), or ``-`` for the standard input.
        complex_: The records of each FASTA file or table are the chains of one complex, called after the file.

    Returns:
        The usable targets in the order of the input, files of a folder by name, with unique names; and one error
        for each bad file or record. An identifier that was used before is an error too.
    """
    found: list[FoundTarget] = []
    errors: list[InputError] = []
    for path in _files(inputs, errors):
        try:
            found += _read(path, errors, complex_)
        except InputError as error:
            errors.append(error)
    return unique_targets(found, errors), errors


def _files(inputs: Iterable[PathLike], errors: list[InputError]) -> Iterator[PathLike]:
    """The inputs, and in place of each folder the files in it that are queries by their name."""
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
        queries = [file for file in files if _is_query(file) and not file.is_dir()]
        if not queries:
            endings = ", ".join((*FASTA_ENDINGS, A3M_ENDING, *TABLE_DELIMITERS))
            errors.append(InputError(f"is a folder without a query in it ({endings}, or .gz)", path=path))
        yield from queries


def _is_query(file: Path) -> bool:
    endings = (*FASTA_ENDINGS, A3M_ENDING, *TABLE_DELIMITERS)
    return not file.name.startswith(".") and _ending(file) in endings


def _ending(path: PathLike) -> str:
    """The ending of a file's name in lower case, without ``.gz``."""
    return os.path.splitext(os.fspath(path).lower().removesuffix(".gz"))[1]


def _read(path: PathLike, errors: list[InputError], complex_: bool) -> list[FoundTarget]:
    """The targets of a file or of the standard input."""
    if os.fspath(path) == STDIN:
        data = read_stdin_bytes(limit=MAX_A3M_BYTES)
        path, ending = STDIN_NAME, _ending_of_content(data)
    else:
        ending = _ending(path)
        limit = MAX_A3M_BYTES if ending == A3M_ENDING else MAX_FASTA_BYTES
        data = read_text_bytes(path, limit=limit)
    if ending == A3M_ENDING:
        return [parse_a3m_query(data, path)]
    if ending in TABLE_DELIMITERS:
        return parse_table(data, path, errors, delimiter=TABLE_DELIMITERS[ending], complex_=complex_)
    return parse_fasta(data, path, errors, complex_=complex_)


def _ending_of_content(data: bytes) -> str:
    """How the name of a file with this content would end."""
    if _HEADER_LINE.match(data):
        return A3M_ENDING
    first = _FIRST_LINE.match(data)
    words = first.group(1).lower() if first else b""
    if b"sequence" in words and not words.startswith(b">"):
        return next((ending for ending, mark in TABLE_DELIMITERS.items() if mark.encode() in words), ".csv")
    return ".fasta"
