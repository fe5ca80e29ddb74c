"""Templates of training samples: a few random ones of the best hits next to the alignments.

As in AlphaFold's supplement (section 1.2.3), the 20 best hits with early enough release dates are kept. Of these ``n``
hits, ``k = min(Uniform[0, n], 4)`` are drawn, so that the network also sees bad templates and none. The dates must
precede the chain's by 60 days, as in AlphaFold's template pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from fastfold.data.msa.find import AlignmentFile
from fastfold.data.templates.database import MmcifFolder, parse_date
from fastfold.data.templates.hits import TemplateHit, TemplateSkipped
from fastfold.data.templates.options import MAX_TEMPLATES
from fastfold.data.templates.select import best_first, check_hit, choose_templates
from fastfold.data.templates.source import read_hits
from fastfold.data.training.entry import Entry, EntryData

MAX_CANDIDATES = 20  #: Largest number of hits from which templates are drawn
DAYS_BEFORE = 60  #: Days by which a template's release must precede the chain's
_PDB_ID = re.compile(r"([0-9][a-z0-9]{3})(?![a-z0-9])", re.ASCII)


@dataclass(frozen=True, eq=False)
class TemplateCandidates:
    """Candidate templates of a chain."""

    hits: Sequence[TemplateHit]  #: At most :data:`MAX_CANDIDATES`, the best first
    query: str  #: Sequence of the chain, ``N`` letters
    entries: MmcifFolder  #: Reader of the structures
    limit: date | None  #: Latest release date, None for any

    def draw(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return features of random templates, see :meth:`fastfold.data.templates.select.ChainTemplates.features`.

        A hit with an invalid structure is replaced by the next in random order.
        """
        number = min(int(rng.integers(len(self.hits) + 1)), MAX_TEMPLATES)
        return self._features([self.hits[i] for i in rng.permutation(len(self.hits))], number)

    def best(self) -> dict[str, np.ndarray]:
        """Return features of the best templates, as for a prediction."""
        return self._features(self.hits, MAX_TEMPLATES)

    def _features(self, hits: Sequence[TemplateHit], number: int) -> dict[str, np.ndarray]:
        chosen = choose_templates(
            hits, self.query, self.entries, max_templates=number, max_date=self.limit, keep_order=True
        )
        return chosen.features()


def read_candidates(path: AlignmentFile, query: str) -> list[TemplateHit]:
    """Read the hits of a search and filter them by their alignments, the best first.

    Raises:
        InputError: The file is invalid, or belongs to another sequence.
    """
    return [hit for hit in best_first(read_hits(path, query)) if _passes(hit, query)]


def _passes(hit: TemplateHit, query: str) -> bool:
    try:
        check_hit(hit, query)
    except TemplateSkipped:
        return False
    return hit.pdb_chain is not None


@dataclass(frozen=True, eq=False)
class TrainingTemplates:
    """Finder of training chains' candidate templates."""

    entries: MmcifFolder  #: The PDB's entries, for the atoms of hits
    max_date: date | None = None  #: Latest release date of any template, or None
    #: Reads hits: :func:`read_candidates`, or the same through a cache
    read: Callable[[AlignmentFile, str], list[TemplateHit]] = read_candidates

    def candidates(self, entry: Entry, data: EntryData) -> dict[str, TemplateCandidates]:
        """Return the candidates of an entry's chains by sequence; chains without hits are absent.

        An experimental structure with unknown release date gets none, because a template could be the structure itself.

        Raises:
            InputError: Hits are invalid.
        """
        limit = self.max_date
        if not entry.has_plddt:
            released = parse_date(data.release_date)
            if released is None:
                return {}
            before = released - timedelta(days=DAYS_BEFORE)
            limit = before if limit is None else min(limit, before)
        own = _PDB_ID.match(entry.structure.name.lower())
        hits = data.hits
        if hits is None:
            files = entry.template_hits(data.chains)
            hits = {sequence: self.read(path, sequence) for sequence, path in files.items()}
        return {
            sequence: TemplateCandidates(
                self._restrict(chain_hits, limit, own and own[1]), sequence, self.entries, limit
            )
            for sequence, chain_hits in hits.items()
        }

    def _restrict(
        self, hits: Sequence[TemplateHit], limit: date | None, own: str | None
    ) -> list[TemplateHit]:
        """Return the first hits that are early enough and do not belong to the entry itself."""
        kept: list[TemplateHit] = []
        for hit in hits:
            if len(kept) == MAX_CANDIDATES:
                break
            assert hit.pdb_chain is not None
            try:
                pdb_id = self.entries.current_id(hit.pdb_chain[0])
                released = self.entries.released(pdb_id)
            except TemplateSkipped:
                continue
            early = limit is None or (released is not None and released <= limit)
            if early and own not in (pdb_id, hit.pdb_chain[0]):
                kept.append(hit)
        return kept
