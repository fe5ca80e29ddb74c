"""``fastfold infer``: fold every target of some files and add the results to a folder."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from fastfold._version import __version__
from fastfold.data.targets import Target
from fastfold.errors import InputError, PlaceError, WeightsError, WriteError
from fastfold.inference.alignment_search import search
from fastfold.inference.config import FolderFormat
from fastfold.inference.distributed import DistributedFolder, DistributedFoldError, distributed_folder
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding.background import open_background
from fastfold.inference.folding.batch import group_by_length
from fastfold.inference.output.references import report_comparison
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.summary import FailuresFile, SummaryFile
from fastfold.inference.prepare import InferJob, about_device, about_kernels, prepare
from fastfold.inference.progress import LOG, Progress, RunLog
from fastfold.inference.report.write import is_stale, write_report
from fastfold.inference.request import InferRequest
from fastfold.inference.target_runner import Ended, FoldedTarget, TargetRunner, TargetWork
from fastfold.utils.device import choose_device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Summary:
    """Summary of a run."""

    folded: tuple[str, ...]  #: Names of the targets folded in this run
    #: Names of the targets that were finished before, or that another process is folding
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]  #: Name (or file) and reason of each failure
    #: For each of these targets without failure, the ``id`` of the requested predictions in the folder
    predictions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def counts(self, done: str = "folded") -> str:
        """Return the numbers of targets that are ``done``, finished before and failed, in words."""
        counts = [f"{len(self.folded)} {done}"]
        counts += [f"{len(self.skipped)} finished before"] if self.skipped else []
        counts += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(counts)


def run(request: InferRequest) -> Summary:
    """Fold all targets by every suitable network with every seed, and rank the predictions.

    Existing results are kept and not computed again. A target that fails is reported, and the others continue. A file
    that cannot be written ends the run. ``FASTFOLD_DEBUG=1`` in the environment shows the traceback of each failure.
    The summary is empty on all but the first of several processes that fold together.

    Raises:
        FastFoldError: The run cannot start, because of weights, folders, or the device.
        WriteError: A result cannot be written; names the missing ones.
    """
    where = choose_device(request.config.device)
    with distributed_folder(request.config.ranks, where) as distributed:
        if distributed is not None and not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return Summary((), (), ())
        job = prepare(request, where)
        job = search(job)
        return fold_all(job, where, distributed)


def fold_all(job: InferJob, device: torch.device, distributed: DistributedFolder | None) -> Summary:
    """Fold the targets of a job, and report what limits its predictions; errors as of :func:`fold_targets`."""
    config, options, targets = job.request.config, job.request.options, job.targets
    costs = job.costs
    if distributed is not None:
        device = distributed.context.device
    with Progress(sum(costs), quiet=options.quiet) as progress:
        announce(job, progress)
        for line in filter(None, (about_device(device), about_kernels(device))):
            progress.line(line)
        if config.cuda_graphs:
            progress.line(
                "CUDA graphs: the second pass of a length is recorded, it and all others are replayed"
            )
        summary = Summary((), (), ())
        if targets:
            kind: FolderFormat = options.output_format if config.embed is None else "embeddings"
            warn, per_target = partial(progress.line, important=True), options.folder_per_target
            folder = ResultsFolder(job.request.output, warn, output_format=kind, per_target=per_target)
            open_log(progress.log, folder.path, f"{len(targets):,} targets on {device}")
            runner = TargetRunner(
                networks=job.networks,
                folder=folder,
                device=device,
                config=config,
                options=options,
                progress=progress,
                distributed=distributed,
                finder=job.finder,
            )
            with open_background(config, device, len(targets)) as runner.background:
                try:
                    summary = fold_targets(runner, targets, costs, errors=job.errors)
                finally:
                    runner.kept.send_home()
    return concluded(summary, job, progress)


def announce(job: InferJob, progress: Progress) -> None:
    """Report warnings, errors and notes of a job before its first fold."""
    for line in (*job.warnings, *(f"error: {error}" for error in job.errors)):
        progress.line(line, important=True)
    for line in job.notes:
        progress.line(line)


def concluded(summary: Summary, job: InferJob, progress: Progress) -> Summary:
    """Return the summary of a run with the errors of its inputs, and log it."""
    summary = replace(summary, failed=(*(("", str(error)) for error in job.errors), *summary.failed))
    progress.log.append(summary.counts())
    return summary


def open_log(log: RunLog, folder: Path, what: str) -> None:
    """Begin the log of a run in its folder, with ``what``, its targets and device."""
    log.open(folder / LOG)
    log.append(f"fastfold {__version__}, PyTorch {version('torch')}: {what}")


class RunResults:
    """Results of a run so far by target, with the folder's tables and page, and ``errors`` of unreadable records."""

    def __init__(self, folder: ResultsFolder, progress: Progress, errors: Iterable[InputError]) -> None:
        self.folder, self.progress = folder, progress
        self.folded: list[str] = []
        self.skipped: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.summary, self._failures = SummaryFile(folder), FailuresFile(folder)
        self._predictions: dict[str, tuple[str, ...]] = {}
        self._failures.add_records(errors)

    def add(self, target: str, predictions: tuple[str, ...], *, made: bool) -> None:
        """Add a target with the ``id`` of its predictions, folded in this run if ``made``."""
        self._failures.remove(target)
        self._predictions[target] = predictions
        (self.folded if made else self.skipped).append(target)

    def fail(self, target: str, reason: str, cost: float) -> None:
        """Add and report a failed target, whose cost is skipped."""
        self.failed.append((target, reason))
        self.progress.skip(cost)
        self.progress.line(f"error: {reason}", important=True)
        self._failures.add(target, reason)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Write the tables also if an error stops the run inside."""
        try:
            yield
        except BaseException:
            with suppress(WriteError):  # the error that stopped the run is reported
                self.summary.flush()
                self._failures.flush()
            raise

    def finish(self, *, has_page: bool) -> Summary:
        """Write the tables and, if there is something to show, the page, or raise WriteError."""
        failed = self._written(self.summary.flush) + self._written(self._failures.flush)
        if has_page and (self.folded or is_stale(self.folder.path)):
            with suppress(InputError):  # nothing to show if all targets failed
                failed += self._written(partial(write_report, self.folder.path, say=self.progress.line))
        return Summary(tuple(self.folded), tuple(self.skipped), (*self.failed, *failed), self._predictions)

    def _written(self, write: Callable[[], object]) -> list[tuple[str, str]]:
        """Write a file, and report an occupied place; return it as a failure without a name."""
        try:
            write()
        except PlaceError as error:
            self.progress.line(f"error: {error}", important=True)
            return [("", str(error))]
        return []


def fold_targets(
    runner: TargetRunner,
    targets: Sequence[Target],
    costs: Sequence[float],
    ended: Iterable[Ended] | None = None,
    errors: Iterable[InputError] = (),
) -> Summary:
    """Fold targets in order, and write the folder's tables and page.

    A failed target does not stop the others. Costs are those in the runner's progress. ``ended`` are results of targets
    that others fold; None to fold them by the runner. ``errors`` are those of records that cannot be read. A WriteError
    names missing results, and a WeightsError tells that a network cannot be loaded.
    """
    run_results = RunResults(runner.folder, runner.progress, errors)
    lengths = [target.num_residues for target in targets]
    groups = (
        [TargetWork(targets[i], f"{i + 1}/{len(targets)} {targets[i].name}", costs[i]) for i in group]
        for group in group_by_length(lengths, runner.options.batch, runner.device)
    )
    with (
        run_results.kept(),
        closing(runner.fold_groups(groups)) if ended is None else nullcontext(ended) as results,
    ):
        for work, result in results:
            _conclude(runner, targets, work, result, run_results)
    return run_results.finish(has_page=runner.config.embed is None)  # a page shows structures


def _conclude(
    runner: TargetRunner,
    targets: Sequence[Target],
    work: TargetWork,
    result: FoldedTarget | Exception,
    run_results: RunResults,
) -> None:
    target, reference = work.target, runner.options.reference
    try:
        if isinstance(result, Exception):
            raise result
        run_results.summary.update(result.results)
        if reference is not None:
            report_comparison(runner.progress, result.results, target, work.label, reference)
    except (DistributedFoldError, WeightsError):
        raise
    except Exception as error:  # also a bug that one target triggers: the others continue
        if isinstance(error, WriteError) and not isinstance(error, PlaceError):  # no target can be written
            done = {*run_results.folded, *run_results.skipped, *(name for name, _ in run_results.failed)}
            left = [t.name for t in targets if t.name not in done]
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise WriteError(
                f"{error}. The run ends here; finished results are kept, not finished: {', '.join(left[:5])}{more}"
            ) from error
        run_results.fail(target.name, reason(error, target), work.cost)
        if debugging():
            run_results.progress.line("".join(traceback.format_exception(error)), important=True)
    else:
        run_results.add(target.name, result.predictions, made=result.made)
