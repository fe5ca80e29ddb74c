"""``fastfold infer``: fold every target of some files and add the results to a folder."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
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
from fastfold.inference.distributed import (
    DistributedFolder,
    DistributedFoldError,
    distributed_folder,
)
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding.background import open_background
from fastfold.inference.folding.batch import group_by_length
from fastfold.inference.folding.target_lines import report_comparison
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.summary import FailuresFile, SummaryFile
from fastfold.inference.prepare import InferJob, about_kernels, prepare
from fastfold.inference.progress import LOG, Progress, RunLog
from fastfold.inference.report.write import NAME as REPORT
from fastfold.inference.report.write import write_report
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

    Args:
        request: Targets to fold, and how.

    Returns:
        Summary of the run. It is empty on all but the first of several processes that fold together.

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
    """Fold the targets of a job, and report what limits its predictions.

    Args:
        job: The job.
        device: Device of the folds by one process.
        distributed: Processes that fold together, each on its own device, if there are several.

    Raises:
        WriteError: A result cannot be written; names the missing ones.
        WeightsError: A network cannot be loaded.
    """
    config, options, targets = job.request.config, job.request.options, job.targets
    costs = job.costs
    if distributed is not None:
        device = distributed.context.device
    with Progress(sum(costs), quiet=options.quiet) as progress:
        announce(job, progress)
        if compiles := about_kernels(device):
            progress.line(compiles)
        if config.cuda_graphs:
            progress.line(
                "CUDA graphs: the second pass of a length is recorded, it and all others are replayed"
            )
        summary = Summary((), (), ())
        if targets:
            kind: FolderFormat = options.output_format if config.embed is None else "embeddings"
            warn = partial(progress.line, important=True)
            folder = ResultsFolder(
                job.request.output, warn, output_format=kind, per_target=options.folder_per_target
            )
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
                summary = fold_targets(runner, targets, costs, errors=job.errors)
    return concluded(summary, job, progress)


def announce(job: InferJob, progress: Progress) -> None:
    """Report warnings, errors and notes of a job before its first fold."""
    for line in (*job.warnings, *(f"error: {error}" for error in job.errors)):
        progress.line(line, important=True)
    for line in job.notes:
        progress.line(line)


def concluded(summary: Summary, job: InferJob, progress: Progress) -> Summary:
    """Return the summary of a run with the errors of its inputs, and log it.

    Args:
        summary: Summary of the folds.
        job: The job.
        progress: Progress with the log of the run.
    """
    summary = replace(summary, failed=(*(("", str(error)) for error in job.errors), *summary.failed))
    progress.log.append(summary.counts())
    return summary


def open_log(log: RunLog, folder: Path, what: str) -> None:
    """Begin the log of a run in its folder.

    Args:
        log: Log of the run.
        folder: The results folder.
        what: Targets and device of the run.
    """
    log.open(folder / LOG)
    log.append(f"fastfold {__version__}, PyTorch {version('torch')}: {what}")


def fold_targets(
    runner: TargetRunner,
    targets: Sequence[Target],
    costs: Sequence[float],
    ended: Iterable[Ended] | None = None,
    errors: Iterable[InputError] = (),
) -> Summary:
    """Fold targets in order, and write the folder's tables and page.

    A failed target does not stop the others.

    Args:
        runner: Runner with the folder of results.
        targets: The targets.
        costs: Cost of each target in the runner's progress.
        ended: Results of targets that others fold; None to fold them by the runner.
        errors: Records that cannot be read.

    Raises:
        WriteError: A result cannot be written; names the missing ones.
        WeightsError: A network cannot be loaded.
    """
    return _FoldingRun(runner, errors).run(targets, costs, ended)


class _FoldingRun:
    """Run over all targets, with the folder's tables and page."""

    def __init__(self, runner: TargetRunner, errors: Iterable[InputError]) -> None:
        self.runner, self.progress = runner, runner.progress
        self.summary = SummaryFile(runner.folder)
        self.failures = FailuresFile(runner.folder)
        self.failures.add_records(errors)

    def run(
        self, targets: Sequence[Target], costs: Sequence[float], ended: Iterable[Ended] | None
    ) -> Summary:
        """Fold the targets in order; a failed one does not stop the others."""
        try:
            if ended is None:
                with closing(self._fold(targets, costs)) as own:
                    found = self._conclude_all(targets, own)
            else:
                found = self._conclude_all(targets, ended)
        except BaseException:
            with suppress(WriteError):  # the error that stopped the run is reported
                self.summary.flush()
                self.failures.flush()
            raise
        failed = finish_tables(self.progress, self.summary.flush, self.failures.flush)
        if self.runner.config.embed is not None:  # a page shows structures
            return replace(found, failed=(*found.failed, *failed))
        if found.folded or not (self.runner.folder.path / REPORT).exists():
            with suppress(InputError):  # nothing to show if all targets failed
                page = partial(write_report, self.runner.folder.path, say=self.progress.line)
                failed += finish_tables(self.progress, page)
        return replace(found, failed=(*found.failed, *failed))

    def _fold(self, targets: Sequence[Target], costs: Sequence[float]) -> Generator[Ended, None, None]:
        runner = self.runner
        lengths = [target.num_residues for target in targets]
        groups = (
            [TargetWork(targets[i], f"{i + 1}/{len(targets)} {targets[i].name}", costs[i]) for i in group]
            for group in group_by_length(lengths, runner.options.batch, runner.device)
        )
        return runner.fold_groups(groups)

    def _conclude_all(self, targets: Sequence[Target], results: Iterable[Ended]) -> Summary:
        folded: list[str] = []
        skipped: list[str] = []
        failed: list[tuple[str, str]] = []
        predictions: dict[str, tuple[str, ...]] = {}
        runner = self.runner
        for work, result in results:
            target = work.target
            try:
                found = _raised(result)
                self.summary.update(found.results)
                if runner.options.reference is not None:
                    report_comparison(
                        self.progress, found.results, target, work.label, runner.options.reference
                    )
            except PlaceError as error:  # other targets can be written
                failed.append(self._failed(target, work.cost, error))
                continue
            except WriteError as error:
                done = {*folded, *skipped, *(name for name, _ in failed)}
                left = [t.name for t in targets if t.name not in done]
                more = f" and {len(left) - 5} more" if len(left) > 5 else ""
                raise WriteError(
                    f"{error}. The run ends here; finished results are kept, not finished: "
                    f"{', '.join(left[:5])}{more}"
                ) from error
            except (DistributedFoldError, WeightsError):
                raise
            except Exception as error:  # also a bug that one target triggers: the others continue
                failed.append(self._failed(target, work.cost, error))
                continue
            self.failures.remove(target.name)
            (folded if found.made else skipped).append(target.name)
            predictions[target.name] = found.predictions
        return Summary(tuple(folded), tuple(skipped), tuple(failed), predictions)

    def _failed(self, target: Target, cost: float, error: Exception) -> tuple[str, str]:
        text = reason(error, target)
        self.progress.skip(cost)
        self.progress.line(f"error: {text}", important=True)
        self.failures.add(target.name, text)
        if debugging():
            self.progress.line("".join(traceback.format_exception(error)), important=True)
        return target.name, text


def _raised(result: FoldedTarget | Exception) -> FoldedTarget:
    """Return the result of a target, or raise its error."""
    if isinstance(result, Exception):
        raise result
    return result


def finish_tables(progress: Progress, *writers: Callable[[], object]) -> list[tuple[str, str]]:
    """Write the tables of a finished run; return errors about occupied places.

    Args:
        progress: Output of the errors.
        writers: Each writes one table.

    Returns:
        An empty name and the reason for each failure.

    Raises:
        WriteError: The disk is full or read-only.
    """
    failed = []
    for write in writers:
        try:
            write()
        except PlaceError as error:
            failed.append(("", str(error)))
            progress.line(f"error: {error}", important=True)
    return failed
