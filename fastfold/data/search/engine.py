"""Search engines, and a plan that runs them: each distinct chain once per engine, into a folder for ``--msa-dir``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fastfold.data.search.needs import find_needs
from fastfold.data.search.store import FOLDER, SearchKey, SearchStore, chain_places, check_place, publish
from fastfold.data.targets import Target
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.units import clock


class Found(NamedTuple):
    """Result for one sequence."""

    sequence: str
    files: Mapping[str, bytes]  #: Contents by file name in the folder of a chain
    facts: Mapping[str, Any]  #: Further facts, for example the number of hits


class SearchStage(NamedTuple):
    """Finished piece of work."""

    cost: float  #: Its part of :meth:`SearchEngine.cost`
    cells: float = 0.0  #: Compared residues of sequences times residues of the database; 0 if unknown


Report = Callable[[SearchStage], None]


class SearchEngine(Protocol):
    """Search in one database or server: a program with its settings, or a server."""

    @property
    def name(self) -> str:
        """Name of the database or server in lines and in the key, for example ``uniref90``."""

    def key(self, store: SearchStore) -> SearchKey:
        """Return the inputs of the results other than sequences."""

    def cost(self, sequences: Sequence[str]) -> float:
        """Return the work of a search, for example in database bytes compared with one residue."""

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        """Search for distinct sequences in upper case; yield each result when it is finished, in any order."""


Say = Callable[[str], None]
OnStep = Callable[[str, str, float], None]
"""Callback with the current work, its status, and the new progress in units of :attr:`SearchPlan.cost`."""


@dataclass(frozen=True)
class _Job:
    """Search of one engine."""

    engine: SearchEngine
    key: SearchKey  #: Key of its results
    sequences: list[str]  #: Distinct sequences to search for
    missing: list[str]  #: Sequences without a result


class SearchPlan:
    """Plan of a search of targets by engines with distinct names, into a folder of alignments.

    The folder is created if missing. Chains that have an alignment there are not searched for
    (:mod:`fastfold.data.search.needs`). ``skip`` returns True for an engine and a target to leave out.

    Raises:
        InputError: The folder cannot be searched for alignments.
        OutputError: A file exists that is not from a search, or the folder cannot be written.
        FastFoldError: An engine cannot search.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        engines: Iterable[SearchEngine],
        out: Path,
        *,
        skip: Callable[[SearchEngine, Target], bool] = lambda engine, target: False,
    ) -> None:
        self._out = prepare_output_directory(out)
        self._store = SearchStore(self._out / FOLDER)
        self._places: dict[tuple[str, str], list[Path]] = {}
        self._jobs: list[_Job] = []
        needs = [find_needs(self._out, target, by_colabfold=False) for target in targets]
        for engine in engines:
            wanted: dict[str, None] = {}
            for target, need in zip(targets, needs, strict=True):
                for sequence, place in ({} if skip(engine, target) else chain_places(target)).items():
                    if not need.wants(mask_unknown(sequence), engine.name):
                        continue
                    self._places.setdefault((engine.name, sequence), []).append(self._out / place)
                    check_place(self._out / place, engine.name)
                    wanted[sequence] = None
            if wanted:
                key = engine.key(self._store)
                missing = [sequence for sequence in wanted if self._store.find(sequence, key) is None]
                self._jobs.append(_Job(engine, key, list(wanted), missing))

    @property
    def cost(self) -> float:
        """Total work, in the engines' unit."""
        return sum(job.engine.cost(job.missing) for job in self._jobs)

    def run(self, *, say: Say, on_step: OnStep, interval_s: float) -> None:
        """Search for missing results, and put all results into their folders.

        A result is in its folder as soon as it is found; finished results are not searched again after an interruption.
        ``say`` gets a summary line for each engine, ``on_step`` (:data:`OnStep`) a call after ``interval_s`` seconds at
        least.

        Raises:
            FastFoldError: An engine cannot search, or a result cannot be written.
        """
        for job in self._jobs:
            known = set(job.sequences) - set(job.missing)
            for sequence in job.sequences:
                if sequence in known:
                    self._publish(job, sequence)
            before = f", {len(known)} found before" if known else ""
            if job.missing:
                meter = _Meter(job.engine.name, len(job.missing), on_step, interval_s)
                for alignment in job.engine.search(job.missing, meter.step):
                    self._store.add(alignment.sequence, job.key, alignment.files, facts=alignment.facts)
                    self._publish(job, alignment.sequence)
                    meter.num_found += 1
                say(f"{job.engine.name}: {meter.close()}{before}")
            else:
                say(f"{job.engine.name}: all {len(known)} found before")

    def _publish(self, job: _Job, sequence: str) -> None:
        files = self._store.find(sequence, job.key)
        assert files is not None
        for place in self._places[job.engine.name, sequence]:
            publish(place, job.key, files)


class _Meter:
    """Accumulate the steps of an engine, and report them at intervals."""

    def __init__(self, name: str, number: int, on_step: OnStep, interval_s: float) -> None:
        self._name, self._number, self._on_step, self._interval_s = name, number, on_step, interval_s
        self._start = self._last = time.monotonic()
        self._cost = self._cells = 0.0
        self.num_found = 0

    def step(self, step: SearchStage) -> None:
        self._cost += step.cost
        self._cells += step.cells
        if time.monotonic() - self._last >= self._interval_s:
            self._pass_on()

    def close(self) -> str:
        """Report the remaining steps; return a summary in words."""
        if self._cost:
            self._pass_on()
        plural = "s" if self._number > 1 else ""
        took = clock(time.monotonic() - self._start)
        return f"{self._number} sequence{plural} searched in {took}{self._rate()}"

    def _pass_on(self) -> None:
        status = f"{self.num_found}/{self._number} found{self._rate()}"
        self._on_step(self._name, status, self._cost)
        self._cost, self._last = 0.0, time.monotonic()

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f", {self._cells / seconds / 1e9:.2f} billion cells/s" if self._cells else ""
