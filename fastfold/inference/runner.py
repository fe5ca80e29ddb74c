"""``fastfold infer``: fold every target of some files and add the results to a folder."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fastfold._version import __version__
from fastfold.data.msa.find import ChainMsas, target_alignments
from fastfold.data.search.colabfold.modes import PUBLIC_SERVER_TERMS
from fastfold.data.targets import Target, number_targets
from fastfold.data.templates.source import TemplateFinder
from fastfold.errors import ConfigError, InputError, PlaceError, WeightsError, WriteError
from fastfold.evoformer.config import has_whole_blocks
from fastfold.evoformer.precision import choose_precision
from fastfold.inference.alignment_search import search_targets
from fastfold.inference.config import FolderFormat, InferConfig
from fastfold.inference.distributed import (
    DistributedFolder,
    DistributedFoldError,
    distributed_folder,
    leading,
    parse_parallel,
)
from fastfold.inference.embed.config import BIOEMU_CHANNELS
from fastfold.inference.embed.files import check_format
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding.background import PLOTS, RELAXATION, Background, count_processes
from fastfold.inference.folding.batch import group_by_length
from fastfold.inference.models import (
    Network,
    about_mini,
    refuse_complexes,
    requested_networks,
    suitable,
    untrained_networks,
)
from fastfold.inference.network_settings import apply_settings, check_settings
from fastfold.inference.output.evaluate import find_reference
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.summary import SummaryFile
from fastfold.inference.planning.cuda_graph import check_cuda_graphs
from fastfold.inference.progress import LOG, Progress, RunLog
from fastfold.inference.relax.config import check_installed
from fastfold.inference.report.write import NAME as REPORT
from fastfold.inference.report.write import write_report
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.screen.failures import FailuresFile
from fastfold.inference.target_runner import Ended, FoldedTarget, TargetRunner, TargetWork
from fastfold.inference.target_templates import check_takers
from fastfold.kernels.common.backend import VARIABLE
from fastfold.utils.device import choose_device
from fastfold.utils.machine import available_cores, host_available_bytes

if TYPE_CHECKING:
    import torch

WITHOUT_ALIGNMENT = (
    "no alignments given: folding from the sequence alone. An alignment makes most predictions far better: --msa-dir "
    f"DIR takes existing ones, --db FASTA searches on this machine, and {PUBLIC_SERVER_TERMS}"
)


@dataclass(frozen=True)
class Summary:
    """Summary of a run.

    Attributes:
        folded: Names of the targets folded in this run.
        skipped: Names of the targets that were finished before, or that another process is folding.
        failed: Name (or file) and reason of each failure.
        predictions: For each of these targets without failure, the ``id`` of the requested predictions in the folder.
    """

    folded: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
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
    with distributed_folder(request.config.parallel, where) as distributed, leading(distributed):
        if distributed is not None and not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return Summary((), (), ())
        return run_leading(request, where, distributed)


def run_leading(
    request: InferRequest,
    where: torch.device,
    distributed: DistributedFolder | None,
    networks: Sequence[Network] | None = None,
) -> Summary:
    """Fold as :func:`run` does, on the first of processes that a caller has started.

    Args:
        request: Targets to fold, and how.
        where: Device of the folds.
        distributed: The processes; None for one.
        networks: Networks of the request that are open; None to open them.

    Raises:
        FastFoldError: See :func:`run`.
    """
    config, chosen = with_precision(request.config, where)
    check_cuda_graphs(config.cuda_graphs, where)
    job = search(prepare(replace(request, config=config), networks))
    job.notes += [line for line in (chosen, about_kernels(where)) if line]
    return fold_all(job, where if distributed is None else distributed.context.device, distributed)


@dataclass
class InferJob:
    """Checked request with its networks and targets.

    Attributes:
        request: The request.
        networks: Networks of the run.
        targets: Targets to fold, in order.
        errors: Errors of the other targets.
        finder: Finder of templates; None if none are requested.
        left_out: Reasons why weights were left out.
        notes: Lines about the run.
    """

    request: InferRequest
    networks: list[Network]
    targets: list[Target]
    errors: list[InputError]
    finder: TemplateFinder | None
    left_out: list[str]
    notes: list[str] = field(default_factory=list)


def prepare(request: InferRequest, networks: Sequence[Network] | None = None) -> InferJob:
    """Check a request, open its networks, and read its targets.

    Args:
        request: The request, with the precision of the device.
        networks: Its networks if they are open; None to open them.

    Raises:
        FastFoldError: The run cannot start.
    """
    config, options = request.config, request.options
    check_request(config, options)
    left_out: list[str] = []
    skip = left_out.append if options.skip_bad_weights else None
    if networks is None:
        networks = requested_networks(request.weights, options.num_models, skip=skip)
    if parse_parallel(config.parallel).ranks > 1:
        check_divisible(networks)
    check_embedding(config, networks)
    check_settings(config, [network.info.config for network in networks])
    check_takers(options.templates, networks)
    finder = TemplateFinder(options.templates) if options.templates.wanted else None
    targets, errors = request.read_targets()
    if not request.weights:
        targets, refused = refuse_complexes(targets)
        errors = [*errors, *refused]
    if options.name_prefix is not None:
        targets = number_targets(targets, options.name_prefix)
    if options.sort == "length":
        targets = sorted(targets, key=lambda target: target.num_residues)
    return InferJob(request, list(networks), targets, errors, finder, left_out)


def search(job: InferJob) -> InferJob:
    """Search for the alignments of a job's targets, if its request says where.

    Raises:
        FastFoldError: A database cannot be searched, or a result cannot be written.
    """
    options = job.request.options
    if options.engines and job.targets:
        options = replace(options, msa_dir=job.request.msa_dir)
        found = search_targets(
            job.targets, options.engines, job.request.msa_dir, quiet=options.quiet, needed_alone=True
        )
        targets, unfound = found.left(job.targets)
        request = replace(job.request, options=options)
        job = replace(job, request=request, targets=targets, errors=[*job.errors, *unfound])
    if options.sort == "depth":
        job.targets.sort(key=lambda target: alignment_depth(target, options.msa_dir))
    return job


def fold_all(job: InferJob, device: torch.device, distributed: DistributedFolder | None) -> Summary:
    """Fold the targets of a job, and report what limits its predictions.

    Args:
        job: The job.
        device: Device of the folds.
        distributed: Processes that fold together, if there are several.

    Raises:
        WriteError: A result cannot be written; names the missing ones.
        WeightsError: A network cannot be loaded.
    """
    config, options, targets = job.request.config, job.request.options, job.targets
    costs = [target_cost(target, suitable(job.networks, target), config) for target in targets]
    with Progress(sum(costs), quiet=options.quiet) as progress:
        for message in job.left_out:
            progress.line(f"warning: left out: {message}", important=True)
        for error in job.errors:
            progress.line(f"error: {error}", important=True)
        report_limits(progress, None if job.request.weights else job.networks[0], targets, options, job.notes)
        for name in untrained_networks(job.networks, targets):
            progress.line(
                f"warning: {name} was trained on single chains only: complexes get no interface scores",
                important=True,
            )
        if config.cuda_graphs:
            progress.line(
                "CUDA graphs: the second pass of a length is recorded, it and all others are replayed"
            )
        summary = Summary((), (), ())
        if targets:
            kind: FolderFormat = options.output_format if config.embed is None else "embeddings"
            warn = partial(progress.line, important=True)
            folder = ResultsFolder(job.request.output, warn, kind, options.folder_per_target)
            open_log(progress.log, folder.path, f"{len(targets):,} targets on {device}")
            runner = TargetRunner(
                job.networks, folder, device, config, options, progress, distributed, job.finder
            )
            with _background(config, len(targets)) as runner.background:
                summary = fold_targets(runner, targets, costs, errors=job.errors)
    summary = replace(summary, failed=(*(("", str(error)) for error in job.errors), *summary.failed))
    progress.log.add(summary.counts())
    return summary


def open_log(log: RunLog, folder: Path, what: str) -> None:
    """Begin the log of a run in its folder.

    Args:
        log: Log of the run.
        folder: The results folder.
        what: Targets and device of the run.
    """
    log.open(folder / LOG)
    log.add(f"fastfold {__version__}, PyTorch {version('torch')}: {what}")


def alignment_depth(target: Target, msa_dir: Path | None) -> int:
    """Return the number of alignment rows of a target; 0 if its alignments cannot be used, which its fold reports."""
    alignments: Sequence[ChainMsas] = ()
    with suppress(InputError):
        alignments = target_alignments(msa_dir, target)
    return sum(len(msa.sequences) for chain in alignments for group in chain for msa in group)


def with_precision(config: InferConfig, device: torch.device) -> tuple[InferConfig, str]:
    """Return the settings with the precision of the device, and a line about a precision chosen automatically.

    Raises:
        ConfigError: The device, or a run of several processes, does not support the precision.
    """
    name = config.precision or ("auto" if device.type == "cuda" else "fp32")
    precision, reason = choose_precision(name, device)
    if config.parallel is not None and precision not in ("fp32", "bf16"):
        raise ConfigError(
            f"several processes fold in fp32 or bf16, not in {precision}; choose one with --precision"
        )
    line = f"precision {precision}: {reason}" if name == "auto" else ""
    return replace(config, precision=precision), line


def check_request(config: InferConfig, options: RunOptions) -> None:
    """Check files, folders and relaxation before the first fold.

    Raises:
        FastFoldError: A file or folder is missing, relaxation does not work, or several processes should search.
    """
    if options.engines and parse_parallel(config.parallel).ranks > 1:
        raise ConfigError(
            "--parallel does not search: run fastfold search first and give its folder as --msa-dir"
        )
    templates = options.templates
    for one in (config.initial_guess, *templates.structures, *templates.complexes, *templates.chains):
        if not isinstance(one, Path | None):
            raise ConfigError(
                f"a run into a folder reads structures from files, and {one.name!r} is an object; fold with "
                "fastfold.predict, or give its file"
            )
    if options.msa_dir is not None and not options.engines and not options.msa_dir.is_dir():
        raise InputError("no such folder; give the folder of the alignments", path=options.msa_dir)
    if options.reference is not None:
        find_reference(options.reference, "")
    for option, path in (("--initial-guess", config.initial_guess), ("--restraints", config.restraints)):
        if path is not None and not path.is_file():
            raise InputError(f"no such file; check the name given with {option}", path=path)
    if config.relax != "none":
        check_installed()
        from fastfold.inference.relax.platforms import choose_platform  # OpenMM is slow to import

        choose_platform(config.relax_platform)


def check_divisible(networks: Sequence[Network]) -> None:
    """Check that several processes can divide the blocks of networks.

    Raises:
        ConfigError: A network lacks steps of AlphaFold's blocks, as ``mini`` does.
    """
    for network in networks:
        if not has_whole_blocks(network.info.config):
            raise ConfigError(
                f"--parallel divides AlphaFold's blocks, and those of {network.name} lack attention along an axis; "
                "leave out --parallel, or give --weights of another network"
            )


def check_embedding(config: InferConfig, networks: Sequence[Network]) -> None:
    """Check the settings of an embedding against the networks.

    Raises:
        ConfigError: A network has fewer blocks, a package is missing, or BioEmu cannot read the embeddings.
    """
    if config.embed is None:
        return
    for network in networks:
        trunk = network.info.config.model.embeddings_and_evoformer
        config.embed.check_network(network.name, trunk.evoformer_num_block)
        channels = (int(trunk.seq_channel), int(trunk.pair_channel))
        if config.embed.file_format == "bioemu" and channels != BIOEMU_CHANNELS:
            raise ConfigError(
                f"BioEmu takes {BIOEMU_CHANNELS[0]} and {BIOEMU_CHANNELS[1]} channels of single and pair, "
                f"{network.name} has {channels[0]} and {channels[1]}; give --weights model_3"
            )
    check_format(config.embed.file_format)
    if config.embed.file_format == "bioemu" and len(networks) > 1:
        raise ConfigError("BioEmu reads one embedding of a sequence: give one network, --weights model_3")


def about_kernels(device: torch.device) -> str:
    """Return a line about kernels that the first fold on a GPU compiles; empty if they are compiled."""
    if device.type != "cuda" or os.environ.get(VARIABLE) == "torch" or find_spec("triton") is None:
        return ""
    from triton import knobs

    if any(Path(knobs.cache.dir).glob("*")):
        return ""
    return f"the first fold compiles about 30 kernels for this GPU, which are kept in {knobs.cache.dir}"


def report_limits(
    progress: Progress,
    mini: Network | None,
    targets: Sequence[Target],
    options: RunOptions,
    about_device: Sequence[str],
) -> None:
    """Report limits of a run's predictions: the small network, missing alignments, and the device.

    Args:
        progress: Output of the lines.
        mini: The small network that ships with the package, if it is used by default.
        targets: Targets of the run.
        options: Options of the run, with the source of alignments.
        about_device: Lines of :func:`with_precision` and :func:`about_kernels`.
    """
    if mini is not None:
        progress.line(about_mini(mini))
    if options.msa_dir is None and any(target.alignments is None for target in targets):
        progress.line(WITHOUT_ALIGNMENT)
    for line in about_device:
        if line:
            progress.line(line)


@contextmanager
def _background(config: InferConfig, targets: int) -> Iterator[Background | None]:
    """Start processes for plots and relaxation; None if there are none."""
    has_plots = config.plots and config.embed is None
    relaxes = config.relax != "none"
    if not has_plots and not relaxes:
        yield None
        return
    # A GPU relaxes one structure at a time.
    is_on_cpu = choose_device(config.device).type == "cpu" or config.relax_platform == "CPU"
    processes = 1
    if relaxes and is_on_cpu:
        processes = count_processes(targets, available_cores(), host_available_bytes())
    background = Background((*(PLOTS if has_plots else ()), *(RELAXATION if relaxes else ())), processes)
    try:
        yield background
    finally:
        background.close()


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
                    runner.compare(found.results, target, work.label, runner.options.reference)
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


def target_cost(target: Target, networks: Sequence[Network], config: InferConfig) -> float:
    """Estimate the work of a target in arbitrary units: cubic in its length, plus a constant.

    Args:
        target: The target.
        networks: Networks that fold it.
        config: Settings of the fold.
    """
    n = target.num_residues
    passes = sum(
        apply_settings(config, network.info.config).model.num_recycle + 1 for network in networks
    ) * len(config.seeds)
    if config.sample is not None:
        passes *= config.sample.number or 1
    return passes * float(n + 50) ** 2 * (n + 500)
