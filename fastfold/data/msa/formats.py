"""Read Stockholm alignments, as written by jackhmmer and hmmsearch, aligned FASTA, and ColabFold's complexes.

The latter are one A3M whose rows span all different chains. The first line, ``#12,10<tab>1,1``, has the chains' lengths
and copy numbers. A row with residues in only one chain is an unpaired row of that chain; one with residues in several
chains pairs them. Rows are read as in ColabFold 1.6.3; see :func:`parse_colabfold`.
"""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fastfold.data.msa.msa import (
    RESIDUE_LETTERS,
    ChainMsas,
    FastaRecord,
    Msa,
    a3m_records,
    a3m_row,
    colabfold_header,
    illegal_character,
    insertions,
    parse_rows,
    say_stops,
    split_records,
)
from fastfold.errors import InputError
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.text_files import PathLike, split_lines

_LOWER = string.ascii_lowercase.encode()


class ChainPart(NamedTuple):
    """Part of a ColabFold alignment for one of its different chains."""

    query: str  #: Sequence of the chain
    copies: int  #: Number of copies
    unpaired: Msa | None  #: Rows of only this chain; None if there are none
    #: The chain's part of each row that several chains share, the query first, also if it contains only gaps; None in
    #: the alignment of a single chain
    paired: Msa | None

    @property
    def msas(self) -> ChainMsas:
        """Return both kinds, as expected by :func:`fastfold.data.features.pipeline.featurize`."""
        return [msa for msa in (self.unpaired,) if msa], [msa for msa in (self.paired,) if msa]


class ColabFoldMsa(NamedTuple):
    """ColabFold alignment of a complex."""

    parts: list[ChainPart]  #: Different chains, in the order of the file
    warnings: list[str]  #: Rows that were left out, one sentence each


def parse_colabfold(text: str, *, path: PathLike | None = None) -> ColabFoldMsa:
    """Split a ColabFold alignment into its different chains.

    A chain's segment of a row begins after the last column of the preceding chain, so insertions between two chains
    belong to the latter. Columns beyond the query's are left out. In a row that ends early, incomplete chains count as
    gaps. A row is paired if at least two chains have a residue in it. Rows of gaps are left out, and so are rows that
    repeat name and text of another. ``<tab>`` in a name separates the names of the chains' parts.

    Raises:
        InputError: The first line is another one, two chains have one sequence, or the rows are not an A3M of its
            length.
    """
    header = colabfold_header(text, path=path)
    if header is None:
        raise InputError(
            "expected ColabFold's first line with the length of each chain, such as '#100,50<tab>1,1', in the "
            "alignment of a complex; or give each chain a separate file, named <id>_<chain>.a3m",
            path=path,
            line=1,
        )
    ends = list(itertools.accumulate(header.lengths))
    spans = list(itertools.pairwise([0, *ends]))
    records, query = a3m_records(text, length=ends[-1], path=path)
    say_stops(records, path)
    queries = [query[start:end].decode("ascii") for start, end in spans]
    if len({mask_unknown(sequence) for sequence in queries}) < len(queries):
        message = "two of the chains have the same sequence; write it once, with the number of copies"
        raise InputError(message, path=path, line=1)
    rows, warnings = _Rows.read(records, ends, path)
    occupied = np.array(
        [[row.count("-", *span) < span[1] - span[0] for span in spans] for row in rows.letters]
    )
    shared = occupied.sum(axis=1) > 1
    is_complex = len(queries) > 1 or header.copies[0] > 1
    parts = []
    for chain, span in enumerate(spans):
        alone = np.flatnonzero(occupied[:, chain] & ~shared)
        # Rows of copies of one chain can be paired only with the query.
        together = np.flatnonzero(shared) if len(queries) > 1 else np.zeros(1, np.int64)
        parts.append(
            ChainPart(
                query=queries[chain],
                copies=header.copies[chain],
                unpaired=rows.take(alone, span, None) if alone.size else None,
                paired=rows.take(together, span, chain) if is_complex else None,
            )
        )
    return ColabFoldMsa(parts, warnings)


class _Rows(NamedTuple):
    """Rows over all chains: letters, deletions ``[S, N]`` and names."""

    letters: list[str]
    deletions: np.ndarray
    names: list[str]

    @classmethod
    def read(
        cls, records: list[FastaRecord], ends: list[int], path: PathLike | None
    ) -> tuple[_Rows, list[str]]:
        """Return the rows that differ in name or text, and warnings."""
        width = ends[-1]
        seen: set[tuple[str, bytes]] = set()
        letters: list[str] = []
        names, odd = [], []
        deletions = np.zeros((len(records), width), np.int32)
        for record in records:
            row = a3m_row(record, width, path)
            if (record.header, row) in seen:
                continue
            seen.add((record.header, row))
            aligned = row.translate(None, _LOWER)
            if len(aligned) != width:
                odd.append(record.line)
            complete = max(end for end in (0, *ends) if end <= len(aligned))
            if len(aligned) < len(row):
                deletions[len(letters), :complete] = insertions(row)[:complete]
            letters.append(aligned[:complete].decode("ascii").ljust(width, "-"))
            names.append(record.header)
        warnings = []
        if odd:
            warnings.append(
                f"{len(odd)} alignment rows, the first on line {odd[0]}, have more or fewer columns than the query; "
                "columns beyond it, and incomplete chains, are left out"
            )
        return cls(letters, deletions[: len(letters)], names), warnings

    def take(self, rows: np.ndarray, span: tuple[int, int], label: int | None) -> Msa:
        """Return some rows in the columns of a chain; ``label`` selects one of the names of a row."""
        names = [self.names[row] for row in rows]
        if label is not None:
            fields = [name.split("\t") for name in names]
            names = [field[min(label, len(field) - 1)] for field in fields]
        return Msa(
            tuple(self.letters[row][slice(*span)] for row in rows),
            self.deletions[rows, slice(*span)],
            tuple(names),
            as_is=True,
        )


_LETTERS = RESIDUE_LETTERS + RESIDUE_LETTERS.lower()
_TO_COLUMNS = bytes.maketrans(RESIDUE_LETTERS.lower() + b".", RESIDUE_LETTERS + b"-")
_GAP = ord("-")


@dataclass
class _Row:
    """Pieces of one row, with the line of each."""

    pieces: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def parse_stockholm(text: str, *, path: PathLike | None = None) -> Msa:
    """Parse an alignment in Stockholm format, wrapped in blocks or not.

    The first row is the query. Columns where it has a gap are insertions of the other rows. They are counted in
    ``deletions`` at the next column of the query, and dropped, as AlphaFold does. ``.`` is a gap like ``-``, and lower
    case equals upper case. ``#=GS <name> DE`` lines are appended to the row's description; other annotation is skipped.

    Raises:
        InputError: The text is empty, not Stockholm, truncated (no ``//``), or holds several alignments; a row has the
            wrong length or a character that is not a residue; the query is all gaps.
    """
    rows, remarks = _collect(text.lstrip("\ufeff").rstrip("\0"), path)
    say_stops([FastaRecord(name, row.lines[0], row.pieces) for name, row in rows.items()], path)
    raw = {name: _encode(name, row, path) for name, row in rows.items()}
    # A stop codon is left out of the query, and is an unknown residue in other rows.
    first = next(iter(raw))
    raw = {name: row.replace(b"*", b"-" if name == first else b"X") for name, row in raw.items()}
    query = raw[first]
    columns = np.flatnonzero(np.frombuffer(query, np.uint8) != _GAP)
    if not columns.size:
        raise InputError("the query, the first row, is all gaps", path=path, record=next(iter(raw)))
    inserted = np.frombuffer(query, np.uint8) == _GAP
    deletions = np.zeros((len(raw), columns.size), np.int32)
    sequences = []
    for i, (name, row) in enumerate(raw.items()):
        if len(row) != len(query):
            raise InputError(
                f"row {i + 1} has {len(row)} columns, the first row has {len(query)}; is the file damaged, or is a "
                "name repeated in one block?",
                path=path,
                line=rows[name].lines[-1],
                record=name,
            )
        letters = np.frombuffer(row, np.uint8)
        before = np.cumsum((letters != _GAP) & inserted)[columns]
        deletions[i] = np.diff(before, prepend=0)
        sequences.append(letters[columns].tobytes().decode("ascii"))
    descriptions = (" ".join((name, *remarks.get(name, ()))) for name in raw)
    return Msa(tuple(sequences), deletions, tuple(descriptions))


def _collect(text: str, path: PathLike | None) -> tuple[dict[str, _Row], dict[str, list[str]]]:
    """Collect the rows in the order of their first pieces, and the description lines of each."""
    rows: dict[str, _Row] = {}
    remarks: dict[str, list[str]] = {}
    ended = False
    for number, line in enumerate(split_lines(text), 1):
        if not line.strip():
            continue
        if ended:
            message = "text after the '//' that ends the alignment; keep one alignment per file"
            raise InputError(message, path=path, line=number)
        if line.startswith("//"):
            ended = True
        elif line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[0] == "#=GS" and words[2] == "DE":
                remarks.setdefault(words[1], []).append(words[3].strip())
        elif line.startswith(">"):
            raise InputError(
                "expected Stockholm, found FASTA or A3M; rename it to .a3m", path=path, line=number
            )
        else:
            words = line.split()
            if len(words) != 2:
                message = "expected a name and a piece of its row; is this Stockholm?"
                raise InputError(message, path=path, line=number)
            row = rows.setdefault(words[0], _Row())
            row.pieces.append(words[1])
            row.lines.append(number)
    if not rows:
        raise InputError("the alignment is empty; remove the file to fold without one", path=path)
    if not ended:
        message = "the alignment is truncated: the '//' at its end is missing; make or copy it again"
        raise InputError(message, path=path, line=number)
    return rows, remarks


def _encode(name: str, row: _Row, path: PathLike | None) -> bytes:
    """Return a row in capital letters, ``-`` and ``*``."""
    raw = "".join(row.pieces).encode("ascii", "replace")
    if raw.translate(None, _LETTERS + b"-.*"):
        for piece, line in zip(row.pieces, row.lines, strict=True):
            if piece.encode("ascii", "replace").translate(None, _LETTERS + b"-.*"):
                raise illegal_character([piece], line, name, path)
    return raw.translate(_TO_COLUMNS)


def is_aligned_fasta(text: str) -> bool:
    """Return True if a text has several FASTA records of equal length, and at least one gap."""
    _, records = split_records(text)
    rows = ["".join("".join(record.lines).split()) for record in records]
    return (
        len(rows) > 1
        and len({len(row) for row in rows}) == 1
        and any("-" in row or "." in row for row in rows)
    )


def parse_aligned_fasta(text: str, *, path: PathLike | None = None) -> Msa:
    r"""Parse an alignment in FASTA, whose rows have equal lengths and whose first row is the query.

    Columns where the query has a gap are insertions of the other rows, as in :func:`parse_stockholm`.

    Raises:
        InputError: The rows have different lengths, or the text is not an alignment of a query.

    Example:
        >>> from fastfold.data.msa.formats import parse_aligned_fasta
        >>> msa = parse_aligned_fasta(">query\nMT-YK\n>homolog\nMSAYK\n")
        >>> msa.sequences, msa.deletions.tolist()
        (('MTYK', 'MSYK'), [[0, 0, 0, 0], [0, 0, 1, 0]])
    """
    _, records = split_records(text)
    rows = ["".join("".join(record.lines).split()) for record in records]
    for record, row in zip(records, rows, strict=True):
        if len(row) != len(rows[0]):
            raise InputError(
                f"expected {len(rows[0])} columns as in the first row, found {len(row)}; align the rows again",
                path=path,
                line=record.line,
                record=record.header,
            )
    query = rows[0] if rows else ""
    columns = [letter not in "-." for letter in query]
    aligned = []
    for record, row in zip(records, rows, strict=True):
        pairs = zip(row.upper().replace(".", "-"), columns, strict=True)
        letters = (letter if is_column else letter.lower().replace("-", "") for letter, is_column in pairs)
        aligned.append((record.line, record.header, "".join(letters)))
    return parse_rows(aligned, path=path)
