"""ColabFold's alignments of complexes: one A3M whose rows run over all different chains.

The first line, ``#12,10<tab>1,1``, has the chains' lengths and copy numbers. A row with residues in one chain
only is an unpaired row of that chain; one with residues in several chains pairs them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from fastfold.data.msa.msa import Msa, colabfold_lengths, parse_a3m_rows
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike


class ChainPart(NamedTuple):
    """What a ColabFold alignment has for one of its different chains.

    Attributes:
        unpaired: Rows of this chain alone, the query first.
        paired: The chain's part of rows shared with other chains, the query first. The description of each
            such row starts with the made-up UniProt name ``tr|COLABFOLD|ROW_xxxxx``, the same in every chain
            and for no other row, so that pairing by species (AlphaFold-Multimer) joins just these parts.
    """

    unpaired: Msa
    paired: Msa


def parse_colabfold(text: str, *, path: PathLike | None = None) -> list[ChainPart]:
    """Splits a ColabFold alignment into its different chains, in the order of the file.

    Args:
        text: The file's content, with ColabFold's first line.
        path: Where it came from, for error messages.

    Raises:
        InputError: There is no such first line, a chain in it is empty, or the rows are not an A3M of its length.
    """
    lengths = colabfold_lengths(text)
    if not lengths or 0 in lengths:
        raise InputError(
            "the alignment of a complex needs ColabFold's first line with the length of each chain, such as "
            "'#100,50<tab>1,1'; or give each chain a file of its own, called <id>_<chain>.a3m",
            path=path,
            line=1,
        )
    msa = parse_a3m_rows(text, lengths=lengths, path=path)
    starts = np.cumsum((0, *lengths))
    occupied = np.array(
        [
            [row.count("-", start, end) < end - start for start, end in itertools.pairwise(starts)]
            for row in msa.sequences
        ]
    )
    shared = occupied.sum(axis=1) > 1
    shared[0] = False  # the query: it comes first of both kinds, without being paired by name
    parts = []
    for chain, (start, end) in enumerate(itertools.pairwise(starts)):
        own = np.flatnonzero(occupied[:, chain])
        parts.append(
            ChainPart(
                unpaired=_columns(msa, [0, *own[~shared[own] & (own > 0)]], start, end),
                paired=_columns(msa, [0, *own[shared[own]]], start, end, paired=True),
            )
        )
    return parts


def _columns(msa: Msa, rows: list[int], start: int, end: int, *, paired: bool = False) -> Msa:
    """Some rows of an alignment, in the columns from start to end."""
    descriptions = [msa.descriptions[row] for row in rows]
    if paired:
        descriptions[1:] = (
            f"tr|COLABFOLD|ROW_{_base36(row):>05} {text}"
            for row, text in zip(rows[1:], descriptions[1:], strict=True)
        )
    return Msa(
        tuple(msa.sequences[row][start:end] for row in rows),
        msa.deletions[rows, start:end],
        tuple(descriptions),
    )


def _base36(number: int) -> str:
    """Digits and capital letters; five of them, the length of a species mnemonic, name 60 million rows."""
    return np.base_repr(number, 36)
