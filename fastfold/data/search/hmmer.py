"""Engines jackhmmer and phmmer: HMMER 3 in this process and its workers, by ``pyhmmer``.

Johnson, Eddy and Portugaly, BMC Bioinformatics 11, 431 (2010) describe jackhmmer; Eddy, PLoS Comput. Biol. 7, e1002195
(2011) describes HMMER 3. The default settings are AlphaFold's.
"""

from __future__ import annotations

import io
import itertools
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import pyhmmer
from pyhmmer.easel import MSA, Alphabet, DigitalMSA, DigitalSequence, KeyHash, TextSequence
from pyhmmer.plan7 import HMM, Background, Builder, TopHits, Trace

from fastfold.data.search.database import SequenceDatabase, content_digest
from fastfold.data.search.engine import Found, Report, SearchStage
from fastfold.data.search.settings import HmmerSettings
from fastfold.data.search.shard_pool import ShardPool, flushed_denormals
from fastfold.data.search.store import SearchKey, SearchStore
from fastfold.errors import InputError

_log = logging.getLogger(__name__)

QUERY = "query"
"""Name of the first row of every alignment, because results are kept by sequence and not by name."""

BATCH = 16  #: Number of sequences compared with the database together; results are kept after each batch

_GAPS = re.compile(r"[-.]+")


@dataclass
class _Query:
    """State of one sequence during the iterations."""

    sequence: str
    digital: DigitalSequence
    ranking: KeyHash
    num_searched: int = 0
    num_hits: int = 0
    msa: DigitalMSA | None = None
    iteration: int = 0


class HmmerEngine:
    """Engine that searches FASTA databases by HMMER; see :class:`~fastfold.data.search.engine.SearchEngine`."""

    def __init__(
        self, settings: HmmerSettings, database: SequenceDatabase, *, num_workers: int, memory_bytes: int
    ) -> None:
        self.name, self.settings, self.database = database.name, settings, database
        self.num_workers, self.memory_bytes = num_workers, memory_bytes

    def key(self, store: SearchStore) -> SearchKey:
        """Return the inputs of the results other than sequences, with the digest of the database.

        Raises:
            InputError: The database cannot be read.
            WriteError: The store cannot be written.
        """
        program = ".".join(pyhmmer.__version__.split(".")[:2])
        digest = content_digest(self.database, store.folder)
        return SearchKey(self.name, {**asdict(self.settings), "pyhmmer": program, "database": digest})

    def cost(self, sequences: Sequence[str]) -> float:
        """Return bytes of the database times residues of the sequences times iterations."""
        return float(self.database.state()["size"]) * sum(map(len, sequences)) * self.settings.iterations

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        """Search for sequences; see :meth:`~fastfold.data.search.engine.SearchEngine.search`.

        Raises:
            ConfigError: The memory is too small.
            InputError: The database is invalid.
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
            hits = deque(pool.search(list(threads.map(_build, active)), steps))
            waiting = []
            for query in active:
                # Hits of large families need more memory than their alignment, so they are freed as soon as it exists.
                is_converged = self._align(query, hits.popleft())
                if is_converged or iteration == self.settings.iterations:
                    yield self._make_result(query)
                    query.msa = None
                    left = self.settings.iterations - iteration
                    report(SearchStage(float(self.database.state()["size"]) * len(query.sequence) * left))
                else:
                    waiting.append(query)
            active = waiting

    def _align(self, query: _Query, hits: TopHits) -> bool:
        """Align the included hits; return True if none of them is new."""
        before = 1 if query.msa is None else len(query.msa.sequences)
        num_new = hits.compare_ranking(query.ranking)
        aligned = hits.to_msa(
            query.digital.alphabet,
            sequences=[query.digital],
            traces=[Trace.from_sequence(query.digital)],
            all_consensus_cols=True,
            digitize=True,
        )
        msa = cast(DigitalMSA, aligned)
        query.iteration, query.msa = query.iteration + 1, msa
        query.num_searched, query.num_hits = hits.searched_sequences, len(hits.included)
        msa.name = f"{QUERY}-i{query.iteration}"
        msa.author = f"{self.settings.engine} (pyhmmer {pyhmmer.__version__})"
        return num_new == 0 and len(msa.sequences) <= before

    def _make_result(self, query: _Query) -> Found:
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
    """Remove repeated rows of an alignment, for a format that identifies rows by name."""
    if len(set(msa.names)) == len(msa.names):
        return msa
    rows: dict[str, tuple[int, str]] = {}
    for number, (name, row) in enumerate(zip(msa.names, msa.textize().alignment, strict=True)):
        if rows.setdefault(name, (number, row))[1] != row:
            raise InputError(
                "two different sequences have this name, which a Stockholm file cannot tell apart; rename one, or "
                "write A3M files (`HmmerSettings.file_format=a3m`)",
                path=database.path,
                record=name.rpartition("/")[0],
            )
    return cast(DigitalMSA, msa.select(sequences=[number for number, _ in rows.values()]))


def _report_part(report: Report, residues: int, num_bytes: int, compared: int) -> None:
    report(SearchStage(float(num_bytes) * residues, float(compared) * residues))


def _build(query: _Query) -> HMM:
    """Build the profile of the next pass, from the sequence or the hits included in the last pass."""
    alphabet = query.digital.alphabet
    builder, background = Builder(alphabet, architecture="hand", seed=42), Background(alphabet)
    with flushed_denormals():
        profile: HMM
        if query.msa is None:
            profile, _, _ = builder.build(query.digital, background)
        else:
            profile, _, _ = builder.build_msa(query.msa, background)
    profile.command_line = None  # pyhmmer writes sys.argv, and cannot pickle it unless it is ASCII
    return profile


def stockholm_text(msa: MSA) -> bytes:
    """Format an alignment as HMMER's programs do, the query first, with ``#=GC RF`` below each block."""
    buffer = io.BytesIO()
    msa.write(buffer, "stockholm")
    return buffer.getvalue()


def a3m_text(msa: DigitalMSA) -> bytes:
    """Format an alignment as A3M, with the first row's residues as columns and lower-case insertions."""
    text = msa.textize()
    rows = text.alignment
    descriptions = [sequence.description for sequence in text.sequences]
    match = [letter not in "-." for letter in rows[0]]
    # Runs of columns of one kind, at whose borders rows are split.
    borders = [0, *(i for i in range(1, len(match)) if match[i] != match[i - 1]), len(match)]
    stretches = [(start, end, match[start]) for start, end in itertools.pairwise(borders)]
    lines = []
    for name, description, row in zip(text.names, descriptions, rows, strict=True):
        pieces = [
            row[start:end].upper().replace(".", "-") if is_match else _GAPS.sub("", row[start:end]).lower()
            for start, end, is_match in stretches
        ]
        lines.append(f">{name} {description or ''}".rstrip() + "\n" + "".join(pieces) + "\n")
    return "".join(lines).encode()
