"""Worker processes: one keeps the networks loaded and folds targets, another one draws and relaxes them."""

from __future__ import annotations

import io
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fastfold.data.targets import Target
from fastfold.data.templates.source import open_templates
from fastfold.errors import FastFoldError, PlaceError, WeightsError, WriteError
from fastfold.inference.config import InferConfig
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding.background import lower_priority
from fastfold.inference.folding.target_lines import conclusion
from fastfold.inference.models import Network, requested_networks
from fastfold.inference.output.references import report_comparison
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.planning.fit import share_host_memory
from fastfold.inference.progress import Progress
from fastfold.inference.request import RunOptions
from fastfold.inference.target_runner import FoldedTarget, TargetRunner, TargetWork
from fastfold.inference.workers.job import JobResult, Status, Task
from fastfold.inference.workers.search import EngineSearch
from fastfold.utils.device import choose_device


@dataclass
class FoldWorker:
    """Picklable function that folds targets into a results folder, opened with the first job.

    ``threads`` are those of PyTorch, and ``sharers`` the workers of its machine, which share the host memory that folds
    on GPUs use. ``leaves_rest`` leaves plots and relaxation to a :class:`FinishWorker`.
    """

    output: Path
    weights: tuple[Path, ...]
    config: InferConfig
    options: RunOptions
    threads: int = 1
    sharers: int = 1
    search: EngineSearch | None = None
    leaves_rest: bool = False
    _runner: TargetRunner | None = field(default=None, init=False, repr=False)

    def __call__(self, number: int, task: Task) -> JobResult:
        """Fold the target of a task, or those of its members in shared passes.

        The result is ``fatal`` if no other target could be folded or written either.
        """
        said = io.StringIO()
        jobs = task.job.members or (task.job,)
        try:
            if self._runner is None:
                self._runner = self.open_runner(*self.open_networks())
            runner = self._runner
        except FastFoldError as error:
            return JobResult("fatal", str(error))
        results = self._fold(runner, [job.payload for job in jobs], task.memory, said)
        if fatal := [result for result in results if result.status == "fatal"]:
            return fatal[0]
        results[0] = replace(results[0], lines=tuple(said.getvalue().splitlines()))
        return JobResult("done", members=tuple(results)) if task.job.members else results[0]

    def _fold(
        self, runner: TargetRunner, targets: Sequence[Target], memory: int | None, said: io.StringIO
    ) -> list[JobResult]:
        runner.progress = replace(runner.progress, stream=said)
        config = replace(self.config, plots=False, relax="none") if self.leaves_rest else self.config
        runner.config = config if memory is None else replace(config, memory_budget=memory)
        results: dict[int, JobResult] = {}
        works: dict[int, TargetWork] = {}
        for index, target in enumerate(targets):
            try:
                if self.search is not None and not target.has_all_alignments:
                    self.search.publish(target)
                works[index] = TargetWork(target, target.name, 1.0)
            except Exception as error:
                results[index] = _failed(target, error, said)
        with runner.progress:
            outcomes = dict(runner.fold_groups([list(works.values())]))
            for index, work in works.items():
                try:
                    results[index] = self._ended(runner, work.target, outcomes[work])
                except Exception as error:  # also a bug that one target triggers: the others continue
                    results[index] = _failed(work.target, error, said)
        return [results[index] for index in range(len(targets))]

    def _ended(self, runner: TargetRunner, target: Target, outcome: FoldedTarget | Exception) -> JobResult:
        if isinstance(outcome, Exception):
            raise outcome
        if outcome.in_progress:
            return JobResult("in_progress")
        if runner.options.reference is not None and not self.leaves_rest:
            report_comparison(runner.progress, outcome.results, target, target.name, runner.options.reference)
        records = outcome.results.records()
        if not records:  # with --skip-bad-weights
            text = f"{target.name}: its suitable networks were left out, because their files are invalid"
            return JobResult("failed", text)
        status: Status = "done" if outcome.made else "finished"
        return JobResult(status, conclusion(records), predictions=outcome.predictions)

    def open_networks(self) -> tuple[list[Network], torch.device]:
        """Prepare this process for folds; return the networks, not yet loaded, and the device."""
        torch.set_num_threads(self.threads)
        device = choose_device(self.config.device)
        if device.type == "cuda":
            # Before other calls, because PyTorch would make a context on the first GPU too.
            torch.cuda.set_device(device)
        share_host_memory(self.sharers)
        skip = (lambda _: None) if self.options.skip_bad_weights else None  # reported by the run itself
        return requested_networks(self.weights, skip=skip), device

    def open_runner(self, networks: list[Network], device: torch.device) -> TargetRunner:
        """Return a runner for the results folder."""
        return TargetRunner(
            networks,
            ResultsFolder(self.output),
            device,
            self.config,
            self.options,
            Progress(0.0, quiet=True),
            finder=open_templates(self.options.templates),
            leaves_rest=self.leaves_rest,
        )


@dataclass
class FinishWorker:
    """Picklable function that draws and relaxes targets which a :class:`FoldWorker` has folded."""

    base: FoldWorker
    threads: int = 1
    _runner: TargetRunner | None = field(default=None, init=False, repr=False)

    def __call__(self, number: int, task: Task) -> JobResult:
        """Finish a :class:`~fastfold.inference.workers.job.FoldedJob`; the result is that of fold and finish together.

        It is ``fatal`` if no other target could be written either.
        """
        target, folded = task.job.payload
        said = io.StringIO()
        try:
            if self._runner is None:
                lower_priority()
                torch.set_num_threads(self.threads)
                self._runner = self.base.open_runner([], torch.device("cpu"))
            runner = self._runner
            runner.progress = replace(runner.progress, stream=said)
            with runner.progress:
                made = folded.status == "done"
                made = runner.finish(target, folded.predictions, made=made) or made
                if runner.options.reference is not None:
                    results = runner.folder.target(target)
                    report_comparison(runner.progress, results, target, target.name, runner.options.reference)
        except Exception as error:  # also a bug that one target triggers: the others continue
            return _failed(target, error, said)
        lines = (*folded.lines, *said.getvalue().splitlines())
        return replace(folded, status="done" if made else "finished", lines=lines)


def _failed(target: Target, error: Exception, said: io.StringIO) -> JobResult:
    if isinstance(error, WriteError | WeightsError) and not isinstance(error, PlaceError):
        return JobResult("fatal", str(error))
    if debugging():
        said.write("".join(traceback.format_exception(error)))
    return JobResult("failed", reason(error, target))
