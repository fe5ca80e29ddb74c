"""Worker of a server: keeps the networks loaded and folds groups of jobs, each into a folder of its own."""

from __future__ import annotations

import contextlib
import os
import stat
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fastfold.data.targets import Target
from fastfold.data.templates.source import open_templates
from fastfold.errors import FastFoldError, PlaceError, WeightsError, WriteError
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding.batch import group_by_length
from fastfold.inference.folding.kept_networks import KeptNetworks
from fastfold.inference.folding.target_lines import conclusion
from fastfold.inference.models import Network, limit_networks, target_cost
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.progress import Progress
from fastfold.inference.runner import Summary, fold_targets, open_log
from fastfold.inference.target_runner import TargetRunner, TargetWork, fold_together
from fastfold.inference.workers.job import JobResult, Task
from fastfold.inference.workers.worker import FoldWorker
from fastfold.products.serve.request import ANSWER, PROGRESS, RESULTS, JobAnswer, JobRequest, write_answer
from fastfold.utils.locks import held


class _ParsedJob(NamedTuple):
    path: Path
    request: JobRequest
    target: Target


@dataclass
class GroupWorker:
    """Picklable function that folds groups of jobs; the networks are opened with the first group.

    The answer to a job is a file in its folder, so it outlives the worker and the server.
    """

    base: FoldWorker
    _opened: tuple[list[Network], torch.device, KeptNetworks] | None = field(
        default=None, init=False, repr=False
    )

    def __call__(self, number: int, task: Task) -> JobResult:
        """Fold a group, with short jobs of similar length in shared passes; an empty one only loads the networks.

        The payload of the task are the folders of jobs with their requests. The result is ``fatal`` if no other job
        could be folded or written either.
        """
        group: Sequence[Path] = task.job.payload
        try:
            if self._opened is None:
                networks, device = self.base.open_networks()
                for network in networks:
                    network.load(self.base.config.precision)
                self._opened = networks, device, KeptNetworks()
            with contextlib.ExitStack() as locks:
                # The worker of a killed server may end a moment later than its server.
                for folder in group:
                    locks.enter_context(held(folder / ".lock"))
                self._fold([folder for folder in group if not (folder / ANSWER).exists()], task.memory)
        except FastFoldError as error:
            return JobResult("fatal", str(error))
        return JobResult("done")

    def _fold(self, group: Sequence[Path], memory: int | None) -> None:
        """Fold jobs and write their answers; errors are those of :func:`_answering`."""
        assert self._opened is not None
        parsed: list[_ParsedJob] = []
        for folder in group:
            with _answering(folder, None):
                request = JobRequest.read(folder)
                parsed.append(_ParsedJob(folder, request, request.target()))
        lengths = [job.target.num_residues for job in parsed]
        for indices in group_by_length(lengths, "auto", self._opened[1]):
            self._fold_together([parsed[index] for index in indices], memory)

    def _fold_together(self, group: Sequence[_ParsedJob], memory: int | None) -> None:
        """Fold jobs in shared passes, and answer each when it ends."""
        runs: dict[TargetWork, tuple[_ParsedJob, TargetRunner]] = {}
        with contextlib.ExitStack() as stack:
            for job in group:
                with _answering(job.path, job.target):
                    runner, work = self._start(job, memory, stack)
                    runs[work] = job, runner
            together = [(runner, work) for work, (_, runner) in runs.items()]
            for work, result in stack.enter_context(contextlib.closing(fold_together(together))):
                job, runner = runs[work]
                with _answering(job.path, job.target):
                    summary = fold_targets(runner, [job.target], [work.cost], [(work, result)])
                    runner.progress.log.append(summary.counts())
                    write_answer(job.path, _answer(job, runner, summary))

    def _start(
        self, job: _ParsedJob, memory: int | None, stack: contextlib.ExitStack
    ) -> tuple[TargetRunner, TargetWork]:
        assert self._opened is not None
        networks, device, kept = self._opened
        config = job.request.config(self.base.config)
        if memory is not None:
            config = replace(config, memory_budget=memory)
        options = job.request.options(self.base.options, job.path)
        networks = limit_networks(networks, options.num_models)
        finder = open_templates(options.templates)
        cost = target_cost(job.target, networks, config)
        results = ResultsFolder(job.path / RESULTS)
        # Line by line, so that the server can send each one at once.
        log = stack.enter_context((job.path / PROGRESS).open("a", encoding="utf-8", buffering=1))
        progress = stack.enter_context(Progress(cost, log))
        open_log(progress.log, results.path, f"1 target on {device}")
        runner = TargetRunner(networks, results, device, config, options, progress, finder=finder, kept=kept)
        return runner, TargetWork(job.target, f"1/1 {job.target.name}", cost)


@contextlib.contextmanager
def _answering(folder: Path, target: Target | None) -> Iterator[None]:
    """Write the error of a job as its answer, but raise one by which other jobs would fail too."""
    try:
        yield
    except PlaceError as error:
        text = str(error)
    except (WriteError, WeightsError):
        raise
    except Exception as error:  # also a bug that one target triggers: the others continue
        if debugging():
            traceback.print_exc()
        text = str(error) if target is None else reason(error, target)
    else:
        return
    write_answer(folder, JobAnswer("failed", text))


def _answer(job: _ParsedJob, runner: TargetRunner, summary: Summary) -> JobAnswer:
    """Return the answer to a folded job; predictions that were finished before a failure can be fetched."""
    records = runner.folder.target(job.target).records()
    files = result_files(job.path)
    text, scores = "", {}
    if records:
        best = {name: value for name, value in records[0].scores.items() if name != "model"}
        text, scores = conclusion(records), best | {"model": records[0].key}
    if summary.failed:
        return JobAnswer("failed", summary.failed[0][1], scores, files)
    return JobAnswer("done", text, scores, files)


def result_files(folder: Path) -> list[str]:
    """Return the names of the regular files in a job's folder of results, which clients may fetch."""
    with contextlib.suppress(OSError), os.scandir(folder / RESULTS) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
        )
    return []
