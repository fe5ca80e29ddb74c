"""``fastfold screen``: fold thousands of targets with several workers, resumable after any interruption."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fastfold.data.search.colabfold.source import ColabFoldSource
from fastfold.data.targets import Target, number_targets
from fastfold.data.templates.source import open_templates
from fastfold.errors import ConfigError, InputError, WriteError
from fastfold.inference.alignment_search import alignment_engines, search_targets
from fastfold.inference.models import requested_networks, target_cost, untrained_networks
from fastfold.inference.network_settings import check_settings
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.summary import SummaryFile
from fastfold.inference.prepare import check_request, limits_of_predictions, with_precision
from fastfold.inference.progress import Progress
from fastfold.inference.report.write import NAME as REPORT
from fastfold.inference.report.write import write_report
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import Summary, finish_tables, open_log
from fastfold.inference.screen.failures import FailuresFile
from fastfold.inference.screen.job import FoldedJob, Job, JobResult
from fastfold.inference.screen.options import ScreenOptions
from fastfold.inference.screen.scheduler import Scheduler
from fastfold.inference.screen.search import ChainSearch, EngineSearch
from fastfold.inference.screen.setup import Setup
from fastfold.inference.target_templates import check_takers
from fastfold.utils.device import choose_device
from fastfold.utils.units import clock

MAX_REPORTED = 10_000
"""Targets of the largest screen that ends with a page of its results."""


def screen(request: InferRequest, where: ScreenOptions) -> Summary:
    """Fold all targets of a request by several workers into a results folder.

    Existing results are not folded again. A target that fails, or that ends its worker twice, is listed in
    ``failures.tsv``, and the others continue.

    Args:
        request: Targets to fold, and how; the folder for the results is the same on all machines.
        where: Workers and limits.

    Returns:
        Summary of the run.

    Raises:
        FastFoldError: The run cannot start, because of weights, folders, devices, or workers.
        WriteError: A result cannot be written; finished results are kept.
    """
    config, options = request.config, request.options
    check_request(config, options)
    if config.parallel is not None:
        raise ConfigError("fastfold screen folds each target in one process; leave out parallel")
    chosen = ""
    if where.ray is None:
        config, chosen = with_precision(config, choose_device(config.device))
    elif config.precision == "auto":
        raise ConfigError(
            "the machines of a cluster may differ: set the precision (--precision) instead of auto"
        )
    else:
        config = replace(config, precision=config.precision or "fp32")
    search: ChainSearch | None = None
    first: ColabFoldSource | None = None
    if options.sources.wanted:
        msa_dir = request.msa_dir.resolve()
        options = replace(options, msa_dir=msa_dir, sources=options.sources.absolute())
        engines = alignment_engines(options)
        if isinstance(engines, Sequence):
            search = EngineSearch(tuple(engines), msa_dir)
        else:
            first = engines
    left_out: list[str] = []
    skip = left_out.append if options.skip_bad_weights else None
    networks = requested_networks(request.weights, options.num_models, skip=skip)
    check_settings(config, [network.info.config for network in networks])
    check_takers(options.templates, networks)
    open_templates(options.templates)  # refuses invalid sources
    targets, errors = request.read_targets()
    if options.name_prefix is not None:
        targets = number_targets(targets, options.name_prefix)
    if untrained := untrained_networks(networks, targets):
        raise ConfigError(
            f"cannot screen complexes with {untrained[0]}, which was trained on single chains only: its structures "
            "are not informative about partners. Give --weights multimer"
        )
    costs = [target_cost(target, networks, config) for target in targets]
    if where.shard is not None:
        mine = where.shard.of(targets, costs)
        targets, costs = [targets[i] for i in mine], [costs[i] for i in mine]
    if first is not None and targets:
        targets, unfound = search_targets(targets, first, msa_dir, quiet=options.quiet, needed_alone=True)
        errors = [*errors, *unfound]
        costs = [target_cost(target, networks, config) for target in targets]
    with Progress(sum(costs), quiet=options.quiet) as progress:
        warn = partial(progress.line, important=True)
        for message in left_out:
            warn(f"warning: left out: {message}")
        for error in errors:
            warn(f"error: {error}")
        for line in (*limits_of_predictions(request, networks, targets), chosen):
            if line:
                progress.line(line)
        summary = Summary((), (), ())
        if targets:
            setup = Setup(
                networks, not request.weights, request.output, config, options, where, search, progress.line
            )
            folder = ResultsFolder(request.output, warn, options.output_format, options.folder_per_target)
            open_log(progress.log, folder.path, f"{len(targets):,} targets")
            summary = _Screen(targets, costs, folder, progress, errors).run(setup)
    summary = replace(summary, failed=(*(("", str(error)) for error in errors), *summary.failed))
    progress.log.append(summary.counts())
    return summary


class _Screen:
    """Targets of a run, with the folder's tables."""

    def __init__(
        self,
        targets: Sequence[Target],
        costs: Sequence[float],
        folder: ResultsFolder,
        progress: Progress,
        errors: Sequence[InputError],
    ) -> None:
        self._targets, self._costs, self._folder, self._progress = targets, costs, folder, progress
        self._table, self._failures = SummaryFile(folder), FailuresFile(folder)
        self._failures.add_records(errors)
        self._folded: list[str] = []
        self._skipped: list[str] = []
        self._failed: list[tuple[str, str]] = []
        self._predictions: dict[str, tuple[str, ...]] = {}

    def run(self, setup: Setup) -> Summary:
        """Fold all targets."""
        rules = setup.rules()
        workers = setup.start()
        self._progress.line(f"{len(self._targets):,} targets, {workers.text}")
        try:
            jobs = setup.jobs(self._targets, self._costs, on_cpu=workers.on_cpu)
            ahead = max(rules.ahead, 4 * workers.count)
            follow = self._rest if workers.are_finished else None
            rules = replace(rules, ahead=ahead)
            Scheduler(jobs, workers.executor, self._report, rules, follow=follow).run()
        except BaseException:
            with suppress(WriteError):  # the error that stopped the run is reported
                self._flush()
            raise
        finally:
            workers.executor.close()
        failed = finish_tables(self._progress, self._table.flush, self._failures.flush)
        if len(self._targets) > MAX_REPORTED:
            self._progress.line(
                f"too many targets for an automatic page; fastfold report {self._folder.path} makes it"
            )
        elif self._folded or not (self._folder.path / REPORT).exists():
            with suppress(InputError):  # nothing to show if all targets failed
                page = partial(write_report, self._folder.path, say=self._progress.line)
                failed += finish_tables(self._progress, page)
        everything_failed = (*self._failed, *failed)
        return Summary(tuple(self._folded), tuple(self._skipped), everything_failed, self._predictions)

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
        number = len(self._folded) + len(self._skipped) + len(self._failed) + 1
        label = f"{number}/{len(self._targets)} {job.name}"
        folded = job.payload if job.kind == "finish" else FoldedJob(job.payload, JobResult("done"))
        target: Target = folded.target
        if result.status == "failed":
            self._failed.append((target.name, result.text))
            self._progress.skip(job.cost)
            self._progress.line(f"error: {result.text}", important=True)
            self._failures.add(target.name, result.text)
            return
        self._failures.remove(target.name)
        self._predictions[target.name] = result.predictions
        self._table.update(self._folder.target(target))
        if result.status == "finished":
            self._skipped.append(target.name)
            self._progress.skip(job.cost)
            self._progress.line(f"{label}: finished before with the same input and settings, skipped")
            return
        self._folded.append(target.name)
        self._progress.step(
            label, f"{result.text}, {clock(folded.result.seconds + result.seconds)}", job.cost
        )

    def _flush(self) -> None:
        self._table.flush()
        self._failures.flush()
