"""Filter the records of a FASTA database that HMMER can search.

``pdb_seqres.txt`` also contains nucleic acids (``mol:na``), some with letters that are not residues, at which HMMER
stops.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_RESIDUES = 100_000  #: Longest sequence of a database that HMMER compares

_OTHER_MOLECULE = re.compile(rb"\S+[ \t]+mol:(?!protein\b)")
_IN_SEQUENCES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*._~ \t\r\n"
_SPACE = b" \t\r\n"


class SkippedRecords(NamedTuple):
    """Records left out of a search."""

    others: int = 0  #: Number of records that are not proteins by their headers
    unreadable: int = 0  #: Number of records that HMMER cannot read
    example: str = ""  #: Name of the first unreadable record, with the reason

    def __add__(self, more: object) -> SkippedRecords:
        if not isinstance(more, SkippedRecords):
            return NotImplemented
        return SkippedRecords(
            self.others + more.others, self.unreadable + more.unreadable, self.example or more.example
        )

    def __str__(self) -> str:
        parts = [f"{self.others:,} that are not proteins (mol:na)"] if self.others else []
        parts += [f"{self.unreadable:,} that cannot be read ({self.example})"] if self.unreadable else []
        return f"records left out of the search: {' and '.join(parts) or 'none'}"


def searchable_records(text: bytes, *, keep_others: bool = False) -> tuple[bytes, SkippedRecords]:
    """Remove the records of a FASTA text that a protein search cannot use, and count them.

    ``keep_others`` counts records of other molecules, but keeps those that HMMER can read.
    """
    kept: list[bytes] = []
    others = unreadable = 0
    example = ""
    for record in (b"\n" + text).split(b"\n>")[1:]:
        is_other = _OTHER_MOLECULE.match(record) is not None
        problem = record_problem(record)
        others += is_other
        if problem and not is_other:
            unreadable += 1
            example = example or f"{record_name(record)[:60]!r}: {problem}"
        if not problem and (keep_others or not is_other):
            kept.append(b">" + record)
    return b"\n".join(kept), SkippedRecords(others, unreadable, example)


def record_problem(record: bytes) -> str:
    """Return HMMER's reason why it cannot read a record, the text after ``>``; empty if it can."""
    header, _, body = record.partition(b"\n")
    if not header[:1].strip():
        return "no FASTA name found"
    foreign = body.translate(None, _IN_SEQUENCES)
    if foreign:
        return f"illegal character {chr(foreign[0])}"
    length = len(body.translate(None, _SPACE))
    if length > MAX_RESIDUES:
        return f"{length:,} residues, HMMER compares up to {MAX_RESIDUES:,}"
    return ""


def record_name(record: bytes) -> str:
    """Return the name of a record as bytes after the ``>``; empty if it has none."""
    words = record.split(None, 1)
    return words[0].decode("utf-8", "replace") if record[:1].strip() and words else ""
