"""Hits of a template search: alignments of PDB chains with the query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PDB_CHAIN = re.compile(r"([a-zA-Z0-9]{4})_([a-zA-Z0-9.]+)")


@dataclass(frozen=True)
class TemplateHit:
    """Alignment of the query with a part of a template's sequence, from a search.

    Attributes:
        index: Number of the hit in the search's output, from 1.
        name: Name of the hit, which begins with ``<PDB id>_<chain>``.
        aligned_cols: Number of columns in which both have a residue, as counted by AlphaFold.
        sum_probs: HHsearch's sum of posterior probabilities; None for hmmsearch.
        query: Letters of the query, ``-`` for a gap.
        hit_sequence: Letters of the template, upper case, ``-`` for a gap. HHsearch's are as long as ``query``;
            hmmsearch's include insertions.
        indices_query: For each column, the residue's place in the query from 0, or -1 for a gap.
        indices_hit: For each column, the residue's place in the template's listed sequence from 0, or -1 for a gap.
    """

    index: int
    name: str
    aligned_cols: int
    sum_probs: float | None
    query: str
    hit_sequence: str
    indices_query: tuple[int, ...]
    indices_hit: tuple[int, ...]

    @property
    def letters(self) -> str:
        """Aligned part of the template without gaps."""
        return self.hit_sequence.replace("-", "")

    @property
    def pdb_chain(self) -> tuple[str, str] | None:
        """PDB id in lower case, and chain; None if the name does not begin with them."""
        found = _PDB_CHAIN.match(self.name)
        return None if found is None else (found[1].lower(), found[2])

    def mapping(self) -> dict[int, int]:
        """Map each aligned residue of the query to its place in :attr:`letters`."""
        first = min((place for place in self.indices_hit if place >= 0), default=0)
        pairs = zip(self.indices_query, self.indices_hit, strict=True)
        return {mine: theirs - first for mine, theirs in pairs if mine >= 0 and theirs >= 0}


def is_ranked(hits: Sequence[TemplateHit]) -> bool:
    """Return True for HHsearch's hits, which are ranked by ``sum_probs``."""
    return bool(hits) and hits[0].sum_probs is not None
