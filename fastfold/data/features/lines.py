"""Lines of a complex's alignment: rows that are paired across its chains, and rows of single chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfold.data.features import merging
from fastfold.data.features.assembly import alignments_by_sequence
from fastfold.data.features.raw import msa_features
from fastfold.data.msa.msa import ChainMsas, Msa
from fastfold.data.msa.sampling import begins_with, join_alignments
from fastfold.data.targets import Chain


@dataclass(frozen=True)
class ComplexLines:
    """Lines of a complex's alignment besides the queries: paired lines first, then rows of each different chain."""

    sequences: tuple[str, ...]  #: Sequence of each chain; equal ones share their rows
    queries: dict[str, Msa]  #: The query of each different chain, an alignment of one row
    paired: dict[str, Msa]  #: Rows of each different chain in the paired lines, ``P`` each
    own: dict[str, Msa]  #: Rows of each different chain alone

    @property
    def number_paired(self) -> int:
        """Number of paired lines ``P``."""
        return len(self.paired[self.sequences[0]].sequences)

    @property
    def number(self) -> int:
        """Number of all lines."""
        return self.number_paired + sum(len(msa.sequences) for msa in self.own.values())

    def take(self, lines: np.ndarray) -> list[ChainMsas]:
        """Return alignments of the queries and some lines, paired line by line, with ``Msa.as_is``.

        The ``lines [K]`` are integers from 0 in increasing order.
        """
        start = self.number_paired
        shared = lines[lines < start]
        found: dict[str, ChainMsas] = {}
        for sequence, own in self.own.items():
            end = start + len(own.sequences)
            alone = own.take(lines[(lines >= start) & (lines < end)] - start)
            start = end
            if len(self.own) == 1:
                found[sequence] = ([_stack(self.queries[sequence], alone)], [])
            else:
                lines_here = _stack(self.queries[sequence], self.paired[sequence].take(shared))
                found[sequence] = ([alone] if alone.sequences else [], [lines_here])
        return [found[sequence] for sequence in self.sequences]


def complex_lines(chains: Sequence[Chain], alignments: Sequence[ChainMsas]) -> ComplexLines:
    """Pair the rows of a complex as its features do, and return all lines.

    Copies of one chain have only their own rows, as for multimer networks.

    Raises:
        InputError: Alignments do not belong to the chains, or cannot be paired.
    """
    by_sequence, in_lines = alignments_by_sequence(chains, alignments)
    sequences = tuple(chain.sequence for chain in chains)
    queries, own, pairable = {}, {}, {}
    for sequence, (chain, (unpaired, paired)) in by_sequence.items():
        letters = chain.letters or sequence
        queries[sequence] = Msa((letters,), np.zeros((1, len(letters)), np.int32), ("query",), as_is=True)
        own[sequence] = _below_query(unpaired, queries[sequence])
        pairable[sequence] = _with_query(paired, queries[sequence])
    none = np.zeros(0, np.int64)
    if len(by_sequence) == 1:
        return ComplexLines(sequences, queries, {key: msa.take(none) for key, msa in own.items()}, own)
    order = merging.chain_order(sequences)
    raw = {key: msa_features([msa], key) for key, msa in pairable.items()}
    rows = merging.paired_lines([raw[sequences[index]] for index in order], in_lines)[1:]
    column = {sequences[index]: rows[:, number] for number, index in enumerate(order)}
    lines = {key: _with_gaps(msa, column[key]) for key, msa in pairable.items()}
    if not in_lines:
        for key, msa in own.items():
            if msa.sequences:
                ids = [msa_features([one], key)["msa"] for one in (msa, _stack(queries[key], lines[key]))]
                own[key] = msa.take(merging.rows_without_copy(*ids))
    return ComplexLines(sequences, queries, lines, own)


def _below_query(msas: Sequence[Msa], query: Msa) -> Msa:
    """Join alignments to their rows without the query."""
    joined = _with_query(msas, query)
    return joined.take(np.arange(1, len(joined.sequences)))


def _with_query(msas: Sequence[Msa], query: Msa) -> Msa:
    """Join alignments, with the query above if it is not the first row."""
    if not msas:
        return query
    joined = join_alignments(msas, unique=True)
    return joined if begins_with(joined, query.sequences[0]) else _stack(query, joined)


def _stack(first: Msa, second: Msa) -> Msa:
    return Msa(
        first.sequences + second.sequences,
        np.concatenate([first.deletions, second.deletions]),
        first.descriptions + second.descriptions,
        as_is=True,
    )


def _with_gaps(msa: Msa, rows: np.ndarray) -> Msa:
    """Return rows by number, with a row of gaps for -1."""
    found = msa.take(rows)
    gaps = "-" * len(msa.sequences[0])
    letters = tuple(row if number >= 0 else gaps for row, number in zip(found.sequences, rows, strict=True))
    names = tuple(
        name if number >= 0 else "none" for name, number in zip(found.descriptions, rows, strict=True)
    )
    deletions = np.where(rows[:, None] < 0, 0, found.deletions)
    return replace(found, sequences=letters, deletions=deletions, descriptions=names)
