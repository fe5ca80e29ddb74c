"""Search for the alignments of a screen's chains: each distinct chain once for all targets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastfold.data.search.database import PAIRING
from fastfold.data.search.engine import SearchEngine
from fastfold.data.search.needs import find_needs
from fastfold.data.search.store import FOLDER, SearchStore, chain_places
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, FastFoldError, InputError, WriteError
from fastfold.inference.alignment_search import AlignmentSearch
from fastfold.inference.error_messages import internal_error
from fastfold.inference.workers.job import Job, JobResult, Task
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.atomic_files import prepare_output_directory

BATCH = 16  #: Number of chains per search


class ChainQuery(NamedTuple):
    """Given sequence of a chain in upper case, and the kinds of rows that targets lack of it."""

    sequence: str
    own: bool  #: Rows of the chain alone
    paired: bool  #: Rows that are paired by species, as in a complex


@dataclass(frozen=True)
class EngineSearch:
    """Picklable search by engines into the store of a folder of alignments, the same on all machines."""

    engines: tuple[SearchEngine, ...]
    out: Path

    def search(self, queries: Sequence[ChainQuery]) -> None:
        """Search for distinct chains without a result, and keep the results; UniProt only for paired rows."""
        store = SearchStore(prepare_output_directory(self.out) / FOLDER)
        for engine in self.engines:
            key = engine.key(store)
            wanted = [
                query.sequence for query in queries if (query.paired if engine.name == PAIRING else query.own)
            ]
            missing = [sequence for sequence in wanted if store.find(sequence, key) is None]
            if missing:
                for alignment in engine.search(missing, lambda step: None):
                    store.add(alignment.sequence, key, alignment.files, facts=alignment.facts)

    def publish(self, target: Target) -> None:
        """Put the results of a target's chains into the folder of alignments for its fold.

        Raises:
            InputError: An alignment of another chain of the target cannot be used.
        """
        needs = find_needs(self.out, target, by_colabfold=False)
        if needs.own:
            needs.check()
        AlignmentSearch(self.engines, self.out, quiet=True).search_databases([target])

    def lines(self, targets: Sequence[Target]) -> list[str]:
        """Return lines about the alignments that targets have; errors are left to their folds."""
        search = AlignmentSearch(self.engines, self.out)
        lines = []
        for target in targets:
            with suppress(InputError):
                lines.append(search.line(target, check=False))
        return list(filter(None, lines))

    def __call__(self, number: int, task: Task) -> JobResult:
        """Search for the :class:`ChainQuery` of a task's payload, in a worker."""
        try:
            self.search(task.job.payload)
        except (ConfigError, WriteError) as error:
            return JobResult("fatal", str(error))
        except FastFoldError as error:
            return JobResult("failed", str(error))
        except Exception as error:  # a bug that one chain triggers: the others continue
            return JobResult("failed", internal_error(error))
        return JobResult("done")


def search_jobs(
    targets: Sequence[Target], costs: Sequence[float], out: Path
) -> tuple[list[Job], list[frozenset[int]]]:
    """Make jobs for all distinct chains that some targets lack in a folder, those of the most expensive target first.

    Jobs have negative numbers, and targets with alignments none; the jobs that each target needs are returned too.
    A target whose alignments cannot be used has none either, because its fold reports the error.
    """
    queries = [_queries(target, out) for target in targets]
    every: dict[str, ChainQuery] = {}
    for query in (one for of_target in queries for one in of_target):
        known = every.get(query.sequence, query)
        own, paired = query.own or known.own, query.paired or known.paired
        every[query.sequence] = query._replace(own=own, paired=paired)
    batch_of: dict[str, int] = {}
    batches: list[list[ChainQuery]] = []
    highest: list[float] = []
    for i in sorted(range(len(targets)), key=lambda i: (-costs[i], i)):
        for sequence, _, _ in queries[i]:
            if sequence in batch_of:
                continue
            if not batches or len(batches[-1]) == BATCH:
                batches.append([])
                highest.append(costs[i])
            batches[-1].append(every[sequence])
            batch_of[sequence] = -len(batches)
    jobs = [
        Job(-number, f"search {number}/{len(batches)}", "search", batch, cost)
        for number, (batch, cost) in enumerate(zip(batches, highest, strict=True), 1)
    ]
    return jobs, [frozenset(batch_of[query.sequence] for query in of_target) for of_target in queries]


def _queries(target: Target, out: Path) -> list[ChainQuery]:
    """Return the distinct sequences of a target to search for, as given."""
    if target.has_all_alignments:
        return []
    try:
        needs = find_needs(out, target, by_colabfold=False)
        queries = []
        for letters in chain_places(target):
            sequence = mask_unknown(letters)
            query = ChainQuery(letters, sequence in needs.own, needs.is_paired and sequence in needs.pairs)
            queries += [query] if query.own or query.paired else []
        if queries:
            needs.check()
    except InputError:
        return []
    return queries
