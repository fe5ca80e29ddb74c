"""The engines jackhmmer and phmmer: HMMER 3 in this process and its workers, by ``pyhmmer``.

Johnson, Eddy and Portugaly, BMC Bioinformatics 11, 431 (2010) describe jackhmmer; Eddy, PLoS Comput. Biol. 7, e1002195
(2011) describes HMMER 3. The settings are those with which AlphaFold calls jackhmmer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import pyhmmer
from pyhmmer.easel import Alphabet, DigitalMSA, DigitalSequence, KeyHash, TextSequence
from pyhmmer.plan7 import HMM, Background, Builder, TopHits, Trace

from fastfold.data.search.alignment_text import a3m_text, stockholm_text
from fastfold.data.search.database import SequenceDatabase, content_digest
from fastfold.data.search.denormals import flushed_denormals
from fastfold.data.search.engine import Found, Report, Step
from fastfold.data.search.settings import HmmerSettings
from fastfold.data.search.shard_pool import ShardPool
from fastfold.data.search.store import SearchKey, SearchStore
from fastfold.errors import InputError

_log = logging.getLogger(__name__)

QUERY = "query"
"""Name of the first row of every alignment: a result is kept by its sequence, whatever that is called."""

BATCH = 16
"""Sequences that go through the database together; what was found for them is kept when all of it was searched."""


@dataclass
class _Query:
    """One sequence on its way through the iterations."""

    sequence: str
    digital: DigitalSequence
    ranking: KeyHash
    num_searched: int = 0
    num_hits: int = 0
    msa: DigitalMSA | None = None
    iteration: int = 0


class HmmerEngine:
    """Searches FASTA databases by HMMER; see :class:`~fastfold.data.search.engine.SearchEngine`.

    Args:
        settings: What is searched for and how.
        database: In which database.
        num_workers: Processes; 1 for none but this one.
        memory_bytes: What they may take together.
    """

    def __init__(
        self, settings: HmmerSettings, database: SequenceDatabase, *, num_workers: int, memory_bytes: int
    ) -> None:
        self.name, self.settings, self.database = database.name, settings, database
        self.num_workers, self.memory_bytes = num_workers, memory_bytes

    def key(self, store: SearchStore) -> SearchKey:
        """What decides the results besides the sequences; the database is known by its contents.

        Raises:
            InputError: The database cannot be read.
            WriteError: The store cannot be written.
        """
        program = ".".join(pyhmmer.__version__.split(".")[:2])
        digest = content_digest(self.database, store.folder)
        return SearchKey(self.name, {**asdict(self.settings), "pyhmmer": program, "database": digest})

    def cost(self, sequences: Sequence[str]) -> float:
        """Bytes of the database times residues of the sequences times iterations."""
        return float(self.database.state()["size"]) * sum(map(len, sequences)) * self.settings.iterations

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        """Search for sequences.

        Args:
            sequences: Upper-case letters.
            report: Called whenever a part of the database has been compared.

        Yields:
            Each sequence with its file.

        Raises:
            ConfigError: The memory is too small.
            InputError: The database cannot be used.
        """
        with (
            ShardPool(
                self.database,
                self.settings.pipeline,
                num_workers=self.num_workers,
                memory_bytes=self.memory_bytes,
            ) as pool,
            ThreadPoolExecutor(self.num_workers) as threads,
        ):
            for first in range(0, len(sequences), BATCH):
                yield from self._search_batch(sequences[first : first + BATCH], pool, threads, report)
            if any(pool.skipped):
                _log.warning("%s: %s", self.database.path, pool.skipped)

    def _search_batch(
        self, sequences: Sequence[str], pool: ShardPool, threads: ThreadPoolExecutor, report: Report
    ) -> Iterator[Found]:
        alphabet = Alphabet.amino()
        active = [
            _Query(sequence, TextSequence(name=QUERY, sequence=sequence).digitize(alphabet), KeyHash())
            for sequence in sequences
        ]
        for iteration in range(1, self.settings.iterations + 1):
            residues = sum(len(query.sequence) for query in active)
            steps = partial(_report_part, report, residues)
            found = deque(pool.search(list(threads.map(_build, active)), steps))
            waiting = []
            for query in active:
                # Hits of large families take more memory than their alignment: they go as soon as that is there.
                is_converged = self._align(query, found.popleft())
                if is_converged or iteration == self.settings.iterations:
                    yield self._found(query)
                    query.msa = None
                    left = self.settings.iterations - iteration
                    report(Step(float(self.database.state()["size"]) * len(query.sequence) * left))
                else:
                    waiting.append(query)
            active = waiting

    def _align(self, query: _Query, hits: TopHits) -> bool:
        """Align what was included; tells whether there was nothing new in it."""
        before = 1 if query.msa is None else len(query.msa.sequences)
        num_new = hits.compare_ranking(query.ranking)
        found = hits.to_msa(
            query.digital.alphabet,
            sequences=[query.digital],
            traces=[Trace.from_sequence(query.digital)],
            all_consensus_cols=True,
            digitize=True,
        )
        msa = cast(DigitalMSA, found)
        query.iteration, query.msa = query.iteration + 1, msa
        query.num_searched, query.num_hits = hits.searched_sequences, len(hits.included)
        msa.name = f"{QUERY}-i{query.iteration}"
        msa.author = f"{self.settings.engine} (pyhmmer {pyhmmer.__version__})"
        return num_new == 0 and len(msa.sequences) <= before

    def _found(self, query: _Query) -> Found:
        assert query.msa is not None
        if self.settings.file_format == "sto":
            text = stockholm_text(_with_distinct_names(query.msa, self.database))
        else:
            text = a3m_text(query.msa)
        name = f"{self.database.name}_hits.{self.settings.file_format}"
        facts = {
            "database": {"path": str(self.database.path), **self.database.state()},
            "sequences_searched": query.num_searched,
            "hits": query.num_hits,
            "rows": len(query.msa.sequences),
            "iterations": query.iteration,
        }
        return Found(query.sequence, {name: text}, facts)


def _with_distinct_names(msa: DigitalMSA, database: SequenceDatabase) -> DigitalMSA:
    """The alignment without rows that are there twice, for a format that knows rows by their names."""
    if len(set(msa.names)) == len(msa.names):
        return msa
    rows: dict[str, tuple[int, str]] = {}
    for number, (name, row) in enumerate(zip(msa.names, msa.textize().alignment, strict=True)):
        if rows.setdefault(name, (number, row))[1] != row:
            raise InputError(
                "two different sequences have this name, which a Stockholm file cannot tell apart; rename one, or "
                "write A3M files (--format a3m)",
                path=database.path,
                record=name.rpartition("/")[0],
            )
    return cast(DigitalMSA, msa.select(sequences=[number for number, _ in rows.values()]))


def _report_part(report: Report, residues: int, num_bytes: int, compared: int) -> None:
    report(Step(float(num_bytes) * residues, float(compared) * residues))


def _build(query: _Query) -> HMM:
    """The profile of the next pass: of the sequence, or of what the last pass included."""
    alphabet = query.digital.alphabet
    builder, background = Builder(alphabet, architecture="hand", seed=42), Background(alphabet)
    with flushed_denormals():
        profile: HMM
        if query.msa is None:
            profile, _, _ = builder.build(query.digital, background)
        else:
            profile, _, _ = builder.build_msa(query.msa, background)
    return profile
