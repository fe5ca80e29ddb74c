"""Multiple sequence alignment of one query, and the records of FASTA and A3M.

In A3M each row has the query's columns as upper-case letters and ``-``. Lower-case letters between two columns are
insertions relative to the query. AlphaFold counts the insertions before each column as deletions (supplement, section
1.2.2 and table 1, ``deletion_matrix``) and drops the letters.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastfold.errors import InputError
from fastfold.protein.residue_constants import hhblits_letter_to_id, mask_unknown
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
# Secondary structure and its confidence, which HH-suite writes above the alignment like rows.
_ANNOTATIONS = frozenset(("ss_pred", "ss_conf", "ss_dssp", "sa_dssp", "sa_pred", "aa_dssp", "aa_pred"))


@dataclass(frozen=True)
class Msa:
    r"""Alignment whose columns are the residues of its first row, the query.

    Raises:
        InputError: Rows are not texts of one length, or deletions, descriptions or keys are not those of the rows.

    Example:
        >>> from fastfold.data.msa.msa import parse_a3m
        >>> msa = parse_a3m(">query\nMTYK\n>homolog\nMSaYK\n")
        >>> msa.sequences, msa.deletions.tolist()
        (('MTYK', 'MSYK'), [[0, 0, 0, 0], [0, 0, 1, 0]])
    """

    #: S rows of N letters each: A-Z and ``-`` for a gap; row 0, the query, has no gap
    sequences: tuple[str, ...]
    #: ``[S, N]`` int32, residues of the row before each column that the query lacks; those after the last column are
    #: not counted (as in AlphaFold)
    deletions: np.ndarray
    descriptions: tuple[str, ...]  #: S texts, the row's name first
    #: True to use the rows unchanged, as ColabFold does: repeated rows are kept, the query need not be among them, and
    #: if rows are paired with other chains' rows, row i is paired with row i
    as_is: bool = False
    #: Per row, the text that it shares with rows of other chains to pair with, empty for none; empty if no row has one
    #: (:func:`fastfold.data.msa.keyed.pair_by_keys`)
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sequences", "descriptions", "keys"):
            texts = getattr(self, name)
            is_list = isinstance(texts, (tuple, list))
            if not is_list or not all(issubclass(kind, str) for kind in set(map(type, texts))):
                raise InputError(f"{name} of an alignment must be a tuple of texts")
        if len(lengths := set(map(len, self.sequences))) > 1:
            raise InputError(f"sequences have {min(lengths)} to {max(lengths)} columns; all must be equal")
        rows, deletions = len(self.sequences), np.asarray(self.deletions)
        shape = (rows, len(self.sequences[0])) if rows else (0, *deletions.shape[1:])
        is_numeric = deletions.shape == shape and deletions.dtype.kind in "biuf"
        with np.errstate(invalid="ignore"):  # NaN is refused below
            counts = deletions.astype(np.int32, copy=False) if is_numeric else deletions
        differs = counts is not deletions and (counts != deletions).any()
        if not is_numeric or differs or counts.min(initial=0) < 0:
            raise InputError(f"deletions must be nonnegative counts of shape {list(shape)}")
        if len(self.descriptions) != rows or len(self.keys) not in (0, rows):
            raise InputError(
                f"an alignment of {rows} rows has {len(self.descriptions)} descriptions and {len(self.keys)} keys; "
                "give one description for each row, and one key or none"
            )
        object.__setattr__(self, "deletions", counts)

    def take(self, rows: Sequence[int] | np.ndarray) -> Msa:
        """Return some rows, by number from 0, in the given order."""
        return Msa(
            tuple(self.sequences[row] for row in rows),
            np.asarray(self.deletions)[rows],
            tuple(self.descriptions[row] for row in rows),
            self.as_is,
            tuple(self.keys[row] for row in rows) if self.keys else (),
        )


ChainMsas = tuple[list[Msa], list[Msa]]
"""Alignments of one chain, and those whose rows are paired with other chains'."""


class ColabFoldHeader(NamedTuple):
    """Content of ColabFold's first line ``#length,length<tab>copies,copies`` about the different chains."""

    lengths: tuple[int, ...]  #: Number of residues of each chain
    copies: tuple[int, ...]  #: Number of copies of each chain


def parse_a3m(text: str, *, path: PathLike | None = None) -> Msa:
    """Parse an alignment of one query in A3M.

    Sequences may be wrapped over lines with any line ends. Also accepted are ``#`` lines above the first row
    (HH-suite's name line, ColabFold's ``#length<tab>copies``), HH-suite's ``>ss_…`` rows, which are skipped, ``.`` for
    gaps, aligned to insertions as in A2M or instead of ``-``, NUL bytes at the end, as written by MMseqs2, and ``*``
    for stop codons (:func:`a3m_row`).

    Raises:
        InputError: The text is empty or not an A3M; a row has the wrong length or a character that is not a residue;
            the query has gaps; or ColabFold's header has several chains.
    """
    header = colabfold_header(text, path=path)
    if header is not None and len(header.lengths) > 1:
        raise InputError(
            f"a ColabFold alignment of {len(header.lengths)} chains cannot be used for one chain: fold the complex, or "
            "give each chain a separate alignment",
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
                f"expected {len(query)} columns as in the query (upper-case letters and gaps), found {len(aligned)} "
                f"in row {i + 1}; make the alignment again or remove the row",
                path=path,
                line=record.line,
                record=record.header,
            )
        if len(aligned) < len(row):
            deletions[i] = insertions(row)
        sequences.append(aligned.decode("ascii"))
    return Msa(tuple(sequences), deletions, tuple(record.header for record in records))


def parse_rows(rows: Sequence[tuple[int, str, str]], *, path: PathLike | None = None) -> Msa:
    """Parse the rows of an A3M from another kind of file: the line, name and letters of each.

    Raises:
        InputError: As of :func:`parse_a3m`, with the row's own line.
    """
    letters = ["".join(text.split()) for _, _, text in rows]
    for (line, name, _), row in zip(rows, letters, strict=True):
        if row.startswith((">", "#")):
            raise illegal_character([row], line, name, path)
    text = "\n".join(f">{name}\n{row}" for (_, name, _), row in zip(rows, letters, strict=True))
    try:
        return parse_a3m(text)
    except InputError as error:
        if error.line is None:
            raise InputError(str(error), path=path) from None
        line, name, _ = rows[(error.line - 1) // 2]
        raise InputError(str(error).partition(": ")[2], path=path, line=line, record=name) from None


def colabfold_header(text: str, *, path: PathLike | None = None) -> ColabFoldHeader | None:
    """Parse ColabFold's first line; return None if the text has another one.

    Raises:
        InputError: The line has too few or too many lengths or copies, or zeros.
    """
    match = _COLABFOLD_HEADER.match(text)
    if match:
        lengths, copies = (tuple(int(number) for number in group.split(",")) for group in match.groups())
        if len(lengths) == len(copies) and 0 not in lengths and 0 not in copies:
            return ColabFoldHeader(lengths, copies)
    if match or _LIKE_COLABFOLD_HEADER.match(text):
        raise InputError(
            "expected ColabFold's first line (the length of each chain, a tab, and the copies of each, such as "
            "'#100,50<tab>2,1'); correct it, or remove it from an alignment of one chain",
            path=path,
            line=1,
        )
    return None


def a3m_records(
    text: str, *, length: int | None = None, path: PathLike | None = None
) -> tuple[list[FastaRecord], bytes]:
    """Parse the rows of an A3M of any number of chains, and the letters of the query.

    ``length`` is the expected number of the query's residues, None for any.

    Raises:
        InputError: The rows or the query are missing, or the file contains several alignments.
    """
    has_mark = any(mark in text for mark in ("\n#", "\r#", "\0#"))  # faster than the regular expression
    if has_mark and (another := _NEXT_COLABFOLD_HEADER.search(text, max(0, text.find(">")))):
        raise InputError(
            "a second alignment begins here (ColabFold's first line); keep one alignment per file: cut the file before "
            "each such line, and fold or name the parts separately",
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
                "expected an A3M, which starts with '>name' and the query", path=path, line=number
            )
        if line.startswith("# STOCKHOLM"):
            message = (
                "this is Stockholm, not A3M; rename it to .sto, an alignment for `msa_dir` and not an input"
            )
            raise InputError(message, path=path, line=number)
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
    """Return the letters and gaps of a row with lower-case insertions; ``.`` and ``*`` are resolved.

    A ``*`` (stop codon) outside the columns is left out, as HH-suite does; in a column it is an unknown residue.

    Raises:
        InputError: A character is neither a residue nor a gap.
    """
    row = _raw_row(record, path)
    if _STOP in row:
        dropped = _without_dots(row.replace(_STOP, b""), num_columns)
        if len(dropped.translate(None, _LOWER)) == num_columns:
            return dropped
        row = row.replace(_STOP, b"X")
    return _without_dots(row, num_columns)


def say_stops(records: Sequence[FastaRecord], path: PathLike | None = None) -> None:
    """Log the number of rows of an alignment with stop codons, if any."""
    stops = [record for record in records if any("*" in line for line in record.lines)]
    if stops:
        _log.warning(
            "%s'*' (stop codon) in %d alignment rows, the first %r on line %d: left out outside the columns, otherwise "
            "read as X",
            "" if path is None else f"{path}: ",
            len(stops),
            stops[0].header[:60],
            stops[0].line,
        )


def insertions(row: bytes) -> np.ndarray:
    """Count the residues before each column of a row with lower-case insertions, ``[N]``.

    Residues after the last column are not counted.
    """
    columns = np.flatnonzero(np.frombuffer(row, np.uint8) < _LOWER[0])
    return np.diff(columns, prepend=-1) - 1


def check_query(msa: Msa, query: str, *, path: PathLike | None = None) -> None:
    """Check that an alignment belongs to a sequence; letters that were read as X equal X.

    Raises:
        InputError: A first row is missing, or differs; names the first different position.
    """
    if not msa.sequences:
        raise InputError("an alignment without rows; leave it out to fold from the sequence alone", path=path)
    first_row, expected = mask_unknown(msa.sequences[0]), mask_unknown(query)
    if first_row == expected:
        return
    shared = min(len(first_row), len(expected))
    at = next((i for i in range(shared) if first_row[i] != expected[i]), shared)
    here = f"{msa.sequences[0][at]!r}" if at < len(first_row) else "the end"
    there = f"{query[at]!r}" if at < len(expected) else "the end"
    raise InputError(
        f"the alignment belongs to another sequence: position {at + 1} of its first row is {here}, of the target "
        f"{there} ({len(first_row)} and {len(expected)} residues); align the target itself or remove the file",
        path=path,
        record=msa.descriptions[0],
    )


def _query_row(record: FastaRecord, path: PathLike | None) -> bytes:
    """Return the query's letters without insertions."""
    row = _raw_row(record, path).translate(None, _LOWER + b".").removesuffix(_STOP)
    problem = None
    if _STOP in row:
        problem = "the query, the first row, has '*' (stop) before its end; cut the alignment there"
    elif not row:
        problem = "the query, the first row, lacks upper-case letters, which A3M uses for residues"
    elif b"-" in row:
        problem = "the query, the first row, has gaps; the columns of A3M are the query's residues"
    if problem:
        raise InputError(problem, path=path, line=record.line, record=record.header)
    return row


def _raw_row(record: FastaRecord, path: PathLike | None) -> bytes:
    """Return the letters of a row after checking that they are legal."""
    row = "".join(record.lines).translate(_NO_BLANKS).encode("ascii", "replace")
    if row.translate(None, _LEGAL + _STOP):
        raise illegal_character(record.lines, record.line + 1, record.header, path)
    return row


def illegal_character(
    lines: list[str], first_line: int, record: str, path: PathLike | None = None
) -> InputError:
    """Return the error for the first invalid character in some lines of an alignment."""
    matches = ((number, _ILLEGAL.search(line)) for number, line in enumerate(lines, first_line))
    number, character = next((number, match.group()) for number, match in matches if match)
    remedy = "make the alignment again"
    if character == "\0":
        remedy = "MMseqs2 puts it between the alignments of a database: unpack it, one file per alignment"
    message = f"{character!r} is neither a residue nor a gap; {remedy}"
    return InputError(message, path=path, line=number, record=record)


def _without_dots(row: bytes, num_columns: int) -> bytes:
    """Drop each ``.`` of a row next to insertions, and convert the others to gaps.

    A2M pads insertions with dots, other programs write them for gaps. The number of columns shows which case applies.
    """
    if b"." not in row:
        return row
    dropped = row.replace(b".", b"")
    if len(dropped.translate(None, _LOWER)) == num_columns:
        return dropped
    return row.replace(b".", b"-")


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
