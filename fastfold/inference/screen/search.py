"""Search for the alignments of a screen's chains: each distinct chain once for all targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastfold.data.search.database import PAIRING
from fastfold.data.search.engine import SearchEngine
from fastfold.data.search.store import FOLDER, SearchStore
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, FastFoldError, WriteError
from fastfold.inference.alignment_search import AlignmentSearch
from fastfold.inference.error_messages import internal_error
from fastfold.inference.screen.job import Job, JobResult, Task
from fastfold.utils.atomic_files import prepare_output_directory

BATCH = 16  #: Number of chains per search


class ChainQuery(NamedTuple):
    """Given sequence of a chain in upper case, and True if its rows are paired by species, as in a complex."""

    sequence: str
    paired: bool


@dataclass(frozen=True)
class EngineSearch:
    """Picklable search by engines into the store of a folder of alignments, the same on all machines."""

    engines: tuple[SearchEngine, ...]
    out: Path

    def search(self, queries: Sequence[ChainQuery]) -> None:
        """Search for distinct chains without a result, and keep the results; UniProt only for paired chains."""
        store = SearchStore(prepare_output_directory(self.out) / FOLDER)
        for engine in self.engines:
            key = engine.key(store)
            wanted = [query.sequence for query in queries if query.paired or engine.name != PAIRING]
            missing = [sequence for sequence in wanted if store.find(sequence, key) is None]
            if missing:
                for found in engine.search(missing, lambda step: None):
                    store.add(found.sequence, key, found.files, facts=found.facts)

    def publish(self, target: Target) -> None:
        """Put the results of a target's chains into the folder of alignments for its fold."""
        AlignmentSearch(self.engines, self.out, quiet=True).run([target])

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


def search_jobs(targets: Sequence[Target], costs: Sequence[float]) -> tuple[list[Job], list[frozenset[int]]]:
    """Make jobs for all distinct chains of some targets, those of the most expensive target first.

    Jobs have negative numbers, and targets with alignments none; the jobs that each target needs are returned too.
    """
    paired = {
        sequence
        for target in targets
        if len({chain.sequence for chain in target.uncut.chains}) > 1
        for sequence in _chains(target)
    }
    batch_of: dict[str, int] = {}
    batches: list[list[ChainQuery]] = []
    highest: list[float] = []
    for i in sorted(range(len(targets)), key=lambda i: (-costs[i], i)):
        for sequence in _chains(targets[i]):
            if sequence in batch_of:
                continue
            if not batches or len(batches[-1]) == BATCH:
                batches.append([])
                highest.append(costs[i])
            batches[-1].append(ChainQuery(sequence, sequence in paired))
            batch_of[sequence] = -len(batches)
    jobs = [
        Job(-number, f"search {number}/{len(batches)}", "search", batch, cost)
        for number, (batch, cost) in enumerate(zip(batches, highest, strict=True), 1)
    ]
    return jobs, [frozenset(batch_of[sequence] for sequence in _chains(target)) for target in targets]


def _chains(target: Target) -> list[str]:
    """Return the distinct sequences to search for, as given."""
    if target.alignments is not None:
        return []
    return list(dict.fromkeys(chain.letters or chain.sequence for chain in target.uncut.chains))
