"""Records of FASTA and A3M files, still as text."""

from __future__ import annotations

from typing import NamedTuple

from fastfold.utils.text_files import split_lines


class FastaRecord(NamedTuple):
    """Record of a FASTA file."""

    header: str  #: Header without its ``>``
    line: int  #: Line number of the header, from 1
    lines: list[str]  #: Lines below it, up to the next header


def split_records(text: str) -> tuple[list[str], list[FastaRecord]]:
    """Split text in FASTA or A3M into the lines above the first header, and the records."""
    lines = split_lines(text)
    starts = [i for i, line in enumerate(lines) if line.startswith(">")]
    records = [
        FastaRecord(lines[i][1:].strip(), i + 1, lines[i + 1 : end])
        for i, end in zip(starts, [*starts[1:], len(lines)], strict=False)
    ]
    return lines[: starts[0]] if starts else lines, records
