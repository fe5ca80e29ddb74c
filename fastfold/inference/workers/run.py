"""``fastfold screen``: fold thousands of targets with several workers, resumable after any interruption."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from fastfold.data.targets import Target
from fastfold.errors import ConfigError
from fastfold.inference.alignment_search import database_engines, search
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.prepare import prepare
from fastfold.inference.progress import Progress
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import RunResults, Summary, announce, concluded, open_log
from fastfold.inference.workers.job import FoldedJob, Job, JobResult
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.scheduler import Scheduler
from fastfold.inference.workers.search import EngineSearch
from fastfold.inference.workers.setup import Setup
from fastfold.utils.device import choose_device
from fastfold.utils.units import clock

MAX_REPORTED = 10_000  #: Targets of the largest screen that ends with a page of its results


def screen(request: InferRequest, where: ScreenOptions) -> Summary:
    """Fold all targets of a request by several workers into a results folder, or raise FastFoldError.

    Existing results are not folded again. A target that fails, or that ends its worker twice, is listed in
    ``failures.tsv``, and the others continue. The results folder is the same on all machines.
    """
    if request.config.parallel is not None:
        raise ConfigError("fastfold screen folds each target in one process; leave out parallel")
    device = None if where.ray is not None else choose_device(request.config.device)
    if request.options.sources.wanted:  # the paths of searches are valid on all machines
        options = request.options
        options = replace(options, msa_dir=request.msa_dir.resolve(), sources=options.sources.absolute())
        request = replace(request, options=options)
    job = prepare(request, device, is_screen=True)
    if where.shard is not None:
        mine = where.shard.of(job.targets, job.costs)
        job.targets = [job.targets[i] for i in mine]
    chains = None
    options = job.request.options
    if options.sources.is_by_colabfold:
        job = search(job)
    elif options.sources.wanted:
        chains = EngineSearch(tuple(database_engines(options.sources)), job.request.msa_dir)
    costs = job.costs
    with Progress(sum(costs), quiet=options.quiet) as progress:
        announce(job, progress)
        summary = Summary((), (), ())
        if job.targets:
            setup = Setup(job.networks, job.request, where, chains, progress.line)
            warn = partial(progress.line, important=True)
            folder = ResultsFolder(request.output, warn, options.output_format, options.folder_per_target)
            open_log(progress.log, folder.path, f"{len(job.targets):,} targets")
            summary = _Screen(job.targets, costs, RunResults(folder, progress, job.errors)).run(setup)
    return concluded(summary, job, progress)


class _Screen:
    def __init__(self, targets: Sequence[Target], costs: Sequence[float], results: RunResults) -> None:
        self._targets, self._costs, self._results = targets, costs, results
        self._progress = results.progress

    def run(self, setup: Setup) -> Summary:
        memory = setup.memory_plan()
        workers = setup.start()
        self._progress.line(f"{len(self._targets):,} targets, {workers.text}")
        with closing(workers.executor), self._results.kept():
            jobs = setup.jobs(self._targets, self._costs, on_cpu=workers.on_cpu)
            follow = self._rest if workers.are_finished else None
            ahead = max(16, 4 * workers.count)
            Scheduler(jobs, workers.executor, self._report, memory, ahead=ahead, follow=follow).run()
        is_large = len(self._targets) > MAX_REPORTED
        summary = self._results.finish(has_page=not is_large)
        if is_large:
            folder = self._results.folder.path
            self._progress.line(f"too many targets for an automatic page; fastfold report {folder} makes it")
        return summary

    def _rest(self, job: Job, result: JobResult) -> Job | None:
        """Return the job that draws and relaxes a folded target; None for other jobs."""
        if job.kind != "fold" or result.status == "failed":
            return None
        number = 2 * len(self._targets) + job.id  # those of groups are smaller
        return Job(number, job.name, "finish", FoldedJob(job.payload, result), job.cost)

    def _report(self, job: Job, result: JobResult) -> None:
        for line in result.lines:
            self._progress.line(line, important=True)
        if job.kind == "search":
            if result.status != "done":
                self._progress.line(f"error: {job.name}: {result.text}", important=True)
            return
        done = self._results
        number = len(done.folded) + len(done.skipped) + len(done.failed) + 1
        label = f"{number}/{len(self._targets)} {job.name}"
        folded = job.payload if job.kind == "finish" else FoldedJob(job.payload, JobResult("done"))
        target: Target = folded.target
        if result.status == "failed":
            done.fail(target.name, result.text, job.cost)
            return
        done.summary.update(done.folder.target(target))
        done.add(target.name, result.predictions, made=result.status != "finished")
        if result.status == "finished":
            self._progress.skip(job.cost)
            self._progress.line(f"{label}: finished before with the same input and settings, skipped")
            return
        seconds = folded.result.seconds + result.seconds
        self._progress.step(label, f"{result.text}, {clock(seconds)}", job.cost)
