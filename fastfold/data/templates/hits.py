"""Hits of a template search: alignments of PDB chains with the query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PDB_CHAIN = re.compile(r"([a-zA-Z0-9]{4})_([a-zA-Z0-9.]+)")


@dataclass(frozen=True)
class TemplateHit:
    """Alignment of the query with a part of a template's sequence, from a search."""

    index: int  #: Number of the hit in the search's output, from 1
    name: str  #: Name of the hit, which begins with ``<PDB id>_<chain>``
    aligned_cols: int  #: Number of columns in which both have a residue, as counted by AlphaFold
    sum_probs: float | None  #: HHsearch's sum of posterior probabilities; None for hmmsearch
    query: str  #: Letters of the query, ``-`` for a gap
    #: Letters of the template, upper case, ``-`` for a gap. HHsearch's are as long as ``query``; hmmsearch's include
    #: insertions.
    hit_sequence: str
    #: For each column, the residue's place in the query from 0, or -1 for a gap
    indices_query: tuple[int, ...]
    #: For each column, the residue's place in the template's listed sequence from 0, or -1 for a gap
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
