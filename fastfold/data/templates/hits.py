"""Hits of a search for templates: which residues of a PDB chain stand at which residues of the query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PDB_CHAIN = re.compile(r"([a-zA-Z0-9]{4})_([a-zA-Z0-9.]+)")


@dataclass(frozen=True)
class TemplateHit:
    """One alignment of the query with a part of a template's sequence, as the search wrote it.

    Attributes:
        index: Number of the hit in the search's output, from 1.
        name: The hit's name, which begins with ``<PDB id>_<chain>``.
        aligned_cols: Number of columns in which both have a residue, as AlphaFold counts them.
        sum_probs: HHsearch's sum of posterior probabilities; None for hmmsearch.
        query: The query's letters, ``-`` where it has a gap.
        hit_sequence: The template's letters, upper case, ``-`` where it has a gap. HHsearch's are as long as
            ``query``; hmmsearch's have the insertions too.
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
        """The aligned part of the template without gaps."""
        return self.hit_sequence.replace("-", "")

    @property
    def pdb_chain(self) -> tuple[str, str] | None:
        """PDB id in lower case, and chain; None if the name does not begin with them."""
        found = _PDB_CHAIN.match(self.name)
        return None if found is None else (found[1].lower(), found[2])

    def mapping(self) -> dict[int, int]:
        """For each aligned residue of the query, its place in :attr:`letters`."""
        first = min((place for place in self.indices_hit if place >= 0), default=0)
        pairs = zip(self.indices_query, self.indices_hit, strict=True)
        return {mine: theirs - first for mine, theirs in pairs if mine >= 0 and theirs >= 0}


def is_ranked(hits: Sequence[TemplateHit]) -> bool:
    """Whether the hits are HHsearch's, which are taken by their ``sum_probs``."""
    return bool(hits) and hits[0].sum_probs is not None
