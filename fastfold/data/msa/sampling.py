"""Samples of one chain's alignment: masked columns and chosen rows, and their A3M text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastfold.data.msa.msa import Msa
from fastfold.data.targets import mask_unknown

UNKNOWN = "X"  #: Letter of masked positions


def join_alignments(msas: Sequence[Msa], *, unique: bool) -> Msa:
    """Join the alignments of one chain to one, which keeps its rows as they are.

    ``unique`` leaves out rows that repeat an earlier one, as AlphaFold's features do, except those of alignments with
    ``Msa.as_is``.
    """
    sequences: list[str] = []
    descriptions: list[str] = []
    deletions: list[np.ndarray] = []
    seen: set[str] = set()
    for number, msa in enumerate(msas):
        kept = []
        for index, row in enumerate(msa.sequences):
            is_repeated = row in seen if unique else number > 0 and index == 0
            if msa.as_is or not is_repeated:
                seen.add(row)
                kept.append(index)
        sequences += [msa.sequences[index] for index in kept]
        descriptions += [msa.descriptions[index] for index in kept]
        deletions.append(np.asarray(msa.deletions)[kept])
    return Msa(tuple(sequences), np.concatenate(deletions), tuple(descriptions), as_is=True)


def mask_columns(msa: Msa, columns: np.ndarray, query: str) -> Msa:
    """Replace all letters of some columns, from 0, by unknown residues, except in the query's row."""
    letters = row_letters(msa)
    letters[int(begins_with(msa, query)) :, columns] = ord(UNKNOWN)
    return replace(msa, sequences=tuple(row.tobytes().decode("ascii") for row in letters))


def row_letters(msa: Msa) -> np.ndarray:
    """Return the letters of an alignment as ASCII codes ``[S, N]`` uint8."""
    letters = np.frombuffer("".join(msa.sequences).encode("ascii", "replace"), np.uint8)
    return letters.reshape(len(msa.sequences), -1).copy()


def a3m_text(msa: Msa, query: str) -> str:
    """Format an alignment as A3M, with the query first.

    Inserted residues, whose letters are unknown, are written as ``x``.
    """
    lines = [] if begins_with(msa, query) else [f">query\n{query}\n"]
    for name, row, counts in zip(msa.descriptions, msa.sequences, np.asarray(msa.deletions), strict=True):
        if counts.any():
            row = "".join("x" * count + letter for count, letter in zip(counts.tolist(), row, strict=True))
        lines.append(f">{name}\n{row}\n")
    return "".join(lines)


def begins_with(msa: Msa, query: str) -> bool:
    """Return True if the first row of an alignment is a sequence, with X for any unknown residue."""
    return mask_unknown(msa.sequences[0]) == mask_unknown(query)
