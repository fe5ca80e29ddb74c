"""A multiple sequence alignment of one query, and its A3M form.

In A3M each row shows the query's columns as upper-case letters and ``-``; what a row has between two columns
stands in lower case and is an insertion relative to the query. AlphaFold counts the insertions before each
column as deletions (supplement, section 1.2.2 and table 1, ``deletion_matrix``) and drops the letters.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastfold.data.fasta import FastaRecord, split_records
from fastfold.data.targets import mask_unknown
from fastfold.errors import InputError
from fastfold.protein.residue_constants import hhblits_letter_to_id
from fastfold.utils.text_files import PathLike, split_lines

_log = logging.getLogger(__name__)

RESIDUE_LETTERS = "".join(sorted(set(hhblits_letter_to_id) - {"-"})).encode()

_LOWER = string.ascii_lowercase.encode()
_LEGAL = RESIDUE_LETTERS + RESIDUE_LETTERS.lower() + b"-."
_STOP = b"*"
_ILLEGAL = re.compile("[^ \t*" + re.escape(_LEGAL.decode()) + "]")
_NO_BLANKS = str.maketrans("", "", " \t")
_COLABFOLD_HEADER = re.compile(
    r"\ufeff?#([0-9]{1,7}(?:,[0-9]{1,7})*)[ \t]+([0-9]{1,7}(?:,[0-9]{1,7})*)[ \t]*(?=[\r\n]|\Z)"
)
_NEXT_COLABFOLD_HEADER = re.compile(r"[\r\n]\0?#[0-9]+(?:,[0-9]+)*\t[0-9]+(?:,[0-9]+)*[ \t]*(?=[\r\n]|\Z)")
_LIKE_COLABFOLD_HEADER = re.compile(r"\ufeff?#[0-9]+ *(?:,[^\t\r\n]*\t|\t|(?:,[0-9]+)+(?: |[\r\n]|\Z))")
# Secondary structure and its confidence, which HH-suite writes above the alignment as if they were rows.
_ANNOTATIONS = frozenset(("ss_pred", "ss_conf", "ss_dssp", "sa_dssp", "sa_pred", "aa_dssp", "aa_pred"))


@dataclass(frozen=True)
class Msa:
    """An alignment whose columns are the residues of its first row, the query.

    Attributes:
        sequences: S rows of N letters each: A-Z and ``-`` for a gap; row 0, the query, has no gap.
        deletions: ``[S, N]`` int32, residues that the row has before each column and the query has not;
            those after the last column are not counted (as in AlphaFold).
        descriptions: S texts, the row's name first.
        as_is: Whether the rows enter the network as they stand, as ColabFold has it: none is dropped because it
            repeats another, the query need not be among them, and where they are to be paired with other
            chains' rows, row i belongs to row i there.
    """

    sequences: tuple[str, ...]
    deletions: np.ndarray
    descriptions: tuple[str, ...]
    as_is: bool = False


ChainMsas = tuple[list[Msa], list[Msa]]
"""Alignments of one chain, and those whose rows are paired with other chains'."""


class ColabFoldHeader(NamedTuple):
    """What ColabFold's first line ``#length,length<tab>copies,copies`` says of the different chains.

    Attributes:
        lengths: Residues of each.
        copies: How many of each there are.
    """

    lengths: tuple[int, ...]
    copies: tuple[int, ...]


def parse_a3m(text: str, *, path: PathLike | None = None) -> Msa:
    """Parses an alignment of one query in A3M.

    Sequences may be wrapped over lines and are read with any line end. Accepted as well: ``#`` lines above
    the first row (HH-suite's name line, ColabFold's ``#length<tab>copies``), HH-suite's ``>ss_…`` rows,
    which are skipped, ``.`` for gaps, aligned to insertions as in A2M or in place of ``-``, NUL bytes at
    the very end, with which MMseqs2 ends an alignment, and ``*`` for stop codons (:func:`a3m_row`).

    Args:
        text: The file's content.
        path: Where it came from, for error messages.

    Raises:
        InputError: The text is empty or not an A3M; a row has the wrong length or a character that is not a residue;
            the query has gaps; ColabFold's header speaks of several chains.
    """
    header = colabfold_header(text, path=path)
    if header is not None and len(header.lengths) > 1:
        raise InputError(
            f"a ColabFold alignment of {len(header.lengths)} chains; it serves a complex of these chains, not one "
            "chain alone: fold the complex, or give each chain an alignment of its own",
            path=path,
            line=1,
        )
    records, query = a3m_records(text, length=header.lengths[0] if header else None, path=path)
    say_stops(records, path)
    deletions = np.zeros((len(records), len(query)), np.int32)
    sequences = []
    for i, record in enumerate(records):
        row = a3m_row(record, len(query), path)
        aligned = row.translate(None, _LOWER)
        if len(aligned) != len(query):
            raise InputError(
                f"row {i + 1} has {len(aligned)} columns, the query has {len(query)}: upper-case letters and "
                "gaps must be as many in each row; make the alignment again or remove the row",
                path=path,
                line=record.line,
                record=record.header,
            )
        if len(aligned) < len(row):
            deletions[i] = insertions(row)
        sequences.append(aligned.decode("ascii"))
    return Msa(tuple(sequences), deletions, tuple(record.header for record in records))


def colabfold_header(text: str, *, path: PathLike | None = None) -> ColabFoldHeader | None:
    """ColabFold's first line; None if the text has another one.

    Args:
        text: The file's content.
        path: Where it came from, for error messages.

    Raises:
        InputError: The line has a length or a number of copies too few, too many, or of zero.
    """
    found = _COLABFOLD_HEADER.match(text)
    if found:
        lengths, copies = (tuple(int(number) for number in group.split(",")) for group in found.groups())
        if len(lengths) == len(copies) and 0 not in lengths and 0 not in copies:
            return ColabFoldHeader(lengths, copies)
    if found or _LIKE_COLABFOLD_HEADER.match(text):
        raise InputError(
            "the first line is not ColabFold's: it has the length of each chain, a tab, and the copies of each, such "
            "as '#100,50<tab>2,1'; correct it, or remove it from an alignment of one chain",
            path=path,
            line=1,
        )
    return None


def a3m_records(
    text: str, *, length: int | None = None, path: PathLike | None = None
) -> tuple[list[FastaRecord], bytes]:
    """The rows of an A3M, whatever number of chains they run over, and the letters of the first, the query.

    Args:
        text: The file's content.
        length: Residues that the query must have; None if that is unknown.
        path: Where it came from, for error messages.

    Raises:
        InputError: There is no row, no query, or more than one alignment.
    """
    has_mark = any(mark in text for mark in ("\n#", "\r#", "\0#"))  # far faster than the search
    if has_mark and (another := _NEXT_COLABFOLD_HEADER.search(text, max(0, text.find(">")))):
        raise InputError(
            "a second alignment begins here (ColabFold's first line); keep one alignment per file: cut the file "
            "before each such line, and fold or name the parts by themselves",
            path=path,
            line=len(split_lines(text[: another.end()])),
        )
    text = text.lstrip("\ufeff").rstrip("\0 \t\r\n")
    if not text:
        raise InputError("the alignment is empty; remove the file to fold without one", path=path)
    preamble, records = split_records(text)
    for number, line in enumerate(preamble, 1):
        if line.strip() and not line.startswith("#"):
            raise InputError(
                "this is not an A3M: it must start with '>name' and the query", path=path, line=number
            )
        if line.startswith("# STOCKHOLM"):
            raise InputError("this is Stockholm, not A3M; rename it to .sto", path=path, line=number)
    records = [record for record in records if (record.header.split() or [""])[0] not in _ANNOTATIONS]
    if not records:
        raise InputError("the alignment has no rows; remove the file to fold without one", path=path)
    query = _query_row(records[0], path)
    if length is not None and length != len(query):
        raise InputError(
            f"the first line announces {length} columns, but the query has {len(query)}; correct one of the two",
            path=path,
            line=1,
        )
    return records, query


def a3m_row(record: FastaRecord, num_columns: int, path: PathLike | None = None) -> bytes:
    """Return the letters and gaps of a row, insertions in lower case, ``.`` and ``*`` resolved.

    A ``*`` (stop codon) that takes no column is left out, as HH-suite does; one in a column is an unknown residue.

    Args:
        record: The row.
        num_columns: Residues of the query.
        path: Its file, for error messages.

    Raises:
        InputError: A character is no residue and no gap.
    """
    row = _raw_row(record, path, allowed=_STOP)
    if _STOP in row:
        dropped = _without_dots(row.replace(_STOP, b""), num_columns)
        if len(dropped.translate(None, _LOWER)) == num_columns:
            return dropped
        row = row.replace(_STOP, b"X")
    return _without_dots(row, num_columns)


def say_stops(records: Sequence[FastaRecord], path: PathLike | None = None) -> None:
    """Log how many rows of an alignment have stop codons, if any."""
    stops = [record for record in records if any("*" in line for line in record.lines)]
    if stops:
        _log.warning(
            "%s'*' (stop codon) in %d alignment rows, the first %r on line %d: left out where it takes no column, "
            "else read as X",
            "" if path is None else f"{path}: ",
            len(stops),
            stops[0].header[:60],
            stops[0].line,
        )


def insertions(row: bytes) -> np.ndarray:
    """Residues before each column of a row that has insertions in lower case.

    Returns:
        ``[N]`` integers; those after the last column are not counted.
    """
    columns = np.flatnonzero(np.frombuffer(row, np.uint8) < _LOWER[0])
    return np.diff(columns, prepend=-1) - 1


def check_query(msa: Msa, query: str, *, path: PathLike | None = None) -> None:
    """Checks that an alignment was made for a sequence.

    Args:
        msa: The alignment.
        query: The sequence; letters that were read as X agree with the X.
        path: The alignment's file, for error messages.

    Raises:
        InputError: The first row differs; with the first position where it does.
    """
    found, expected = mask_unknown(msa.sequences[0]), mask_unknown(query)
    if found == expected:
        return
    shared = min(len(found), len(expected))
    at = next((i for i in range(shared) if found[i] != expected[i]), shared)
    here = f"{msa.sequences[0][at]!r}" if at < len(found) else "the end"
    there = f"{query[at]!r}" if at < len(expected) else "the end"
    raise InputError(
        f"the alignment is of another sequence: position {at + 1} of its first row is {here}, of the target "
        f"{there} ({len(found)} and {len(expected)} residues); align the target itself or remove the file",
        path=path,
        record=msa.descriptions[0],
    )


def _query_row(record: FastaRecord, path: PathLike | None) -> bytes:
    """The query's letters without insertions."""
    row = _raw_row(record, path, allowed=_STOP).translate(None, _LOWER + b".").removesuffix(_STOP)
    problem = None
    if _STOP in row:
        problem = "the query, the first row, has '*' (stop) before its end; cut the alignment there"
    elif not row:
        problem = "the query, the first row, has no upper-case letter; A3M writes it in upper case"
    elif b"-" in row:
        problem = "the query, the first row, has gaps; the columns of A3M are the query's residues"
    if problem:
        raise InputError(problem, path=path, line=record.line, record=record.header)
    return row


def _raw_row(record: FastaRecord, path: PathLike | None, *, allowed: bytes) -> bytes:
    """Return the letters of a row, all of them legal or ``allowed``."""
    row = "".join(record.lines).translate(_NO_BLANKS).encode("ascii", "replace")
    if row.translate(None, _LEGAL + allowed):
        raise illegal_character(record.lines, record.line + 1, record.header, path)
    return row


def illegal_character(
    lines: list[str], first_line: int, record: str, path: PathLike | None = None
) -> InputError:
    """The error for the first character in some lines that can stand in no alignment."""
    matches = ((number, _ILLEGAL.search(line)) for number, line in enumerate(lines, first_line))
    number, character = next((number, match.group()) for number, match in matches if match)
    remedy = "make the alignment again"
    if character == "\0":
        remedy = "MMseqs2 puts it between the alignments of a database: unpack it, one file per alignment"
    message = f"{character!r} is neither a residue nor a gap; {remedy}"
    return InputError(message, path=path, line=number, record=record)


def _without_dots(row: bytes, num_columns: int) -> bytes:
    """A row whose ``.`` are dropped where they stand next to insertions, and are gaps otherwise.

    A2M pads insertions with dots, other programs write them for gaps; which of the two is meant shows in the
    number of columns.
    """
    if b"." not in row:
        return row
    dropped = row.replace(b".", b"")
    if len(dropped.translate(None, _LOWER)) == num_columns:
        return dropped
    return row.replace(b".", b"-")
