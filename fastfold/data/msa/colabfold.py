"""ColabFold's alignments of complexes: one A3M whose rows run over all different chains.

The first line, ``#12,10<tab>1,1``, has the chains' lengths and copy numbers. A row with residues in one chain
only is an unpaired row of that chain; one with residues in several chains pairs them. Rows are read as ColabFold
1.6.3 reads them, which is described at :func:`parse_colabfold`.
"""

from __future__ import annotations

import itertools
import string
from typing import NamedTuple

import numpy as np

from fastfold.data.fasta import FastaRecord
from fastfold.data.msa.msa import (
    ChainMsas,
    Msa,
    a3m_records,
    a3m_row,
    colabfold_header,
    insertions,
    say_stops,
)
from fastfold.data.targets import mask_unknown
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike

_LOWER = string.ascii_lowercase.encode()


class ChainPart(NamedTuple):
    """What a ColabFold alignment has for one of its different chains.

    Attributes:
        query: The chain's sequence.
        copies: How many of it there are.
        unpaired: Rows of this chain alone; None if there are none.
        paired: The chain's part of each row that several chains share, the query first, also where this chain has
            gaps only; None in the alignment of a single chain.
    """

    query: str
    copies: int
    unpaired: Msa | None
    paired: Msa | None

    @property
    def msas(self) -> ChainMsas:
        """Both kinds, as :func:`fastfold.data.features.pipeline.featurize` takes them."""
        return [msa for msa in (self.unpaired,) if msa], [msa for msa in (self.paired,) if msa]


class ColabFoldMsa(NamedTuple):
    """A ColabFold alignment.

    Attributes:
        parts: Its different chains, in the order of the file.
        warnings: What was left out, one sentence each.
    """

    parts: list[ChainPart]
    warnings: list[str]


def parse_colabfold(text: str, *, path: PathLike | None = None) -> ColabFoldMsa:
    """Splits a ColabFold alignment into its different chains.

    A chain's segment of a row begins behind the last column of the chain before, so that insertions between two
    chains belong to the latter. Columns beyond the query's are left out; in a row that ends early, chains that are
    not complete count as gaps. A row is paired if two chains or more have a residue in it. Rows of gaps are left
    out, and so is what repeats a row, name and text. ``<tab>`` in a name separates the names of the chains' parts.

    Args:
        text: The file's content, with ColabFold's first line.
        path: Where it came from, for error messages.

    Raises:
        InputError: There is no such first line, two chains have one sequence, or the rows are not an A3M of its length.
    """
    header = colabfold_header(text, path=path)
    if header is None:
        raise InputError(
            "the alignment of a complex needs ColabFold's first line with the length of each chain, such as "
            "'#100,50<tab>1,1'; or give each chain a file of its own, called <id>_<chain>.a3m",
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
        # The rows of copies of one chain have nothing to be paired with but the query itself.
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
        """The rows that differ in name or text, and warnings."""
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
                "what is beyond it, and chains that are not complete, are left out"
            )
        return cls(letters, deletions[: len(letters)], names), warnings

    def take(self, rows: np.ndarray, span: tuple[int, int], label: int | None) -> Msa:
        """Some rows in the columns of a chain; ``label`` chooses among the names of a row."""
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
