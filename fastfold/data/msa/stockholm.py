"""Parse Stockholm alignments, as written by jackhmmer and hmmsearch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastfold.data.msa.msa import RESIDUE_LETTERS, FastaRecord, Msa, illegal_character, say_stops
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

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
