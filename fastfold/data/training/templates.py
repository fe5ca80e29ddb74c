"""Templates of training samples: a random few of the best hits that lie beside the alignments.

As in AlphaFold's supplement (section 1.2.3): of the hits whose structures were released early enough the 20 best are
kept, and of these ``n`` hits ``k = min(Uniform[0, n], 4)`` are drawn at random, so that the network sees bad templates
and none at all as well. "Early enough" is 60 days before the chain, as in the official program's template pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from fastfold.data.msa.find import AlignmentFile
from fastfold.data.templates.database import MmcifFolder, parse_date
from fastfold.data.templates.hits import TemplateHit
from fastfold.data.templates.options import MAX_TEMPLATES
from fastfold.data.templates.outcome import TemplateSkipped
from fastfold.data.templates.prefilter import check_hit
from fastfold.data.templates.select import best_first, take_templates
from fastfold.data.templates.source import read_hits
from fastfold.data.training.complex_entry import ComplexData
from fastfold.data.training.entry import Entry, EntryData

MAX_CANDIDATES = 20
"""Hits that templates are drawn from."""
DAYS_BEFORE = 60
"""Days by which a template must have been released before the chain."""
_PDB_ID = re.compile(r"([0-9][a-z0-9]{3})(?![a-z0-9])", re.ASCII)


@dataclass(frozen=True, eq=False)
class Candidates:
    """What the templates of a chain are drawn from.

    Attributes:
        hits: At most :data:`MAX_CANDIDATES`, the best first.
        query: The chain's sequence, ``N`` letters.
        entries: Where the structures are.
        limit: Newest release date allowed, None for any.
    """

    hits: Sequence[TemplateHit]
    query: str
    entries: MmcifFolder
    limit: date | None

    def draw(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Raw features of random templates (:meth:`fastfold.data.templates.select.ChainTemplates.features`).

        A hit whose structure cannot be used gives its place to the next of the random order.

        Args:
            rng: Source of randomness; two draws, whatever becomes of the hits.
        """
        number = min(int(rng.integers(len(self.hits) + 1)), MAX_TEMPLATES)
        return self._features([self.hits[i] for i in rng.permutation(len(self.hits))], number)

    def best(self) -> dict[str, np.ndarray]:
        """The same of the best hits, as a prediction takes them."""
        return self._features(self.hits, MAX_TEMPLATES)

    def _features(self, hits: Sequence[TemplateHit], number: int) -> dict[str, np.ndarray]:
        taken = take_templates(hits, self.query, self.entries, max_templates=number, max_date=self.limit)
        return taken.features()


def read_candidates(path: AlignmentFile, query: str) -> list[TemplateHit]:
    """Reads the hits of a search, without those that a look at the alignment rules out; the best first.

    Args:
        path: As for :func:`fastfold.data.templates.source.read_hits`.
        query: The chain's sequence.

    Raises:
        InputError: The file cannot be used, or is that of another sequence.
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
    """Finds the candidates of training chains.

    Attributes:
        entries: The PDB's entries, from which hits get their atoms.
        max_date: Newest release date of any template, or None.
        read: Reads hits: :func:`read_candidates`, or the same through a cache.
    """

    entries: MmcifFolder
    max_date: date | None = None
    read: Callable[[AlignmentFile, str], list[TemplateHit]] = read_candidates

    def candidates(self, entry: Entry, data: EntryData | ComplexData) -> dict[str, Candidates]:
        """The candidates of an entry's chains by their sequence; chains without hits are not there.

        An experimental structure whose release date nobody knows has none: a template could be the structure itself.

        Args:
            entry: The entry.
            data: What its files hold.

        Raises:
            InputError: Hits cannot be used.
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
            sequence: Candidates(self._restrict(found, limit, own and own[1]), sequence, self.entries, limit)
            for sequence, found in hits.items()
        }

    def _restrict(
        self, hits: Sequence[TemplateHit], limit: date | None, own: str | None
    ) -> list[TemplateHit]:
        """The first hits that are early enough and not of the entry itself."""
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
