"""Read ColabFold's alignments of complexes: one A3M whose rows span all different chains.

The first line, ``#12,10<tab>1,1``, has the chains' lengths and copy numbers. A row with residues in only one chain is
an unpaired row of that chain; one with residues in several chains pairs them. Rows are read as in ColabFold 1.6.3; see
:func:`parse_colabfold`.
"""

from __future__ import annotations

import itertools
import string
from typing import NamedTuple

import numpy as np

from fastfold.data.msa.msa import (
    ChainMsas,
    FastaRecord,
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
