"""``fastfold infer``: fold every target of some files and add what was found to a folder."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastfold.data.msa.find import ChainMsas, load_alignments
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import InputError, WeightsError, WriteError
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder, DistributedFoldError, distributed_folder
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding import TargetPredictor, keeps_pae
from fastfold.inference.models import MINI, Network, about_mini, open_networks, suitable
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.output.evaluate import compare_target, find_reference
from fastfold.inference.output.results_folder import PredictionRecord, ResultsFolder, TargetResults
from fastfold.inference.output.summary import SummaryFile
from fastfold.inference.output.writer import (
    Wanted,
    coverage_files,
    draw_plot,
    ranking_scores,
    run_record,
    stops,
    write_prediction,
)
from fastfold.inference.progress import Progress
from fastfold.inference.relax.config import RelaxConfig, check_installed
from fastfold.inference.report.write import NAME as REPORT
from fastfold.inference.report.write import write_report
from fastfold.utils.device import choose_device, peak_memory


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        folded: Names of the targets of which something was folded now.
        skipped: Names of those of which everything was finished before, or is being folded by another process.
        failed: Name (or file) and reason of each that failed.
    """

    folded: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RunOptions:
    """What a run does beside folding.

    Attributes:
        msa_dir: Folder of alignments; None to fold from the sequences alone.
        complex_: Each file is one complex.
        reference: Experimental structures to compare with: a file, or a folder of files named like the targets.
        skip_bad_weights: Leave weights files out that cannot be used, rather than end the run.
        overwrite: Fold everything anew, and remove what the folder has of the targets otherwise.
        sort: ``length`` to fold short targets first, ``input`` to keep their order.
        quiet: Say nothing but warnings and errors.
    """

    msa_dir: Path | None = None
    complex_: bool = False
    reference: Path | None = None
    skip_bad_weights: bool = False
    overwrite: bool = False
    sort: str = "input"
    quiet: bool = False


def run(
    inputs: Sequence[Path],
    output: Path,
    weights: Sequence[Path],
    config: InferConfig | None = None,
    options: RunOptions | None = None,
) -> Summary:
    """Fold all targets, each by every network that suits it with every seed, and rank its predictions.

    What the folder has already stays, and is not folded again; a target that fails is reported and the others go on. A
    file that cannot be written ends the run. With ``FASTFOLD_DEBUG=1`` in the environment the traceback of each failure
    is shown.

    Args:
        inputs: Files of sequences.
        output: Folder for the results.
        weights: Weights files; none for the small network that ships with the package.
        config: How to fold.
        options: What else to do.

    Returns:
        How the run ended. It is empty on all but the first of several processes that fold together.

    Raises:
        FastFoldError: Nothing can be folded at all: unusable weights, folders, or device.
        WriteError: A result cannot be written; says what is missing.
    """
    config, options = config or InferConfig(), options or RunOptions()
    where = choose_device(config.device)
    with distributed_folder(config.parallel, where) as distributed, _leading(distributed):
        if distributed is not None and not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return Summary((), (), ())
        if options.msa_dir is not None and not options.msa_dir.is_dir():
            raise InputError("no such folder; give the one that holds the alignments", path=options.msa_dir)
        if options.reference is not None:
            find_reference(options.reference, "")
        if config.initial_guess is not None and not config.initial_guess.is_file():
            raise InputError(
                "no such file; check the name given with --initial-guess", path=config.initial_guess
            )
        if config.relax != "none":
            check_installed()
        skipped: list[str] = []
        networks = open_networks(
            weights or [Path(MINI)], skip=skipped.append if options.skip_bad_weights else None
        )
        targets, errors = read_targets(inputs, complex_=options.complex_)
        if options.sort == "length":
            targets = sorted(targets, key=lambda target: target.num_residues)
        costs = [_cost(target, suitable(networks, target), config) for target in targets]
        with Progress(sum(costs), quiet=options.quiet) as progress:
            for message in skipped:
                progress.line(f"warning: left out: {message}", important=True)
            for error in errors:
                progress.line(f"error: {error}", important=True)
            if not weights:
                progress.line(about_mini(networks[0]))
            summary = Summary((), (), ())
            if targets:
                device = where if distributed is None else distributed.context.device
                folder = ResultsFolder(output, partial(progress.line, important=True))
                runner = _Runner(networks, folder, device, config, options, progress, distributed)
                summary = runner.run(targets, costs)
    return replace(summary, failed=(*(("", str(error)) for error in errors), *summary.failed))


@contextmanager
def _leading(distributed: DistributedFolder | None) -> Iterator[None]:
    """On the first of several processes, let the others end with it."""
    try:
        yield
    except DistributedFoldError:
        raise  # the others do not listen
    except Exception:
        if distributed is not None and distributed.context.is_rank_zero:
            distributed.stop()
        raise
    if distributed is not None and distributed.context.is_rank_zero:
        distributed.stop()


@dataclass(frozen=True)
class _Job:
    """One prediction to be made.

    Attributes:
        network: By which network.
        seed: With which seed.
        record: See :func:`fastfold.inference.output.writer.run_record`.
    """

    network: Network
    seed: int
    record: dict[str, Any]

    @property
    def id(self) -> str:
        """What the prediction is known by in the results folder."""
        return str(self.record["input_hash"])


@dataclass
class _Runner:
    """What all targets of a run share."""

    networks: list[Network]
    folder: ResultsFolder
    device: torch.device
    config: InferConfig
    options: RunOptions
    progress: Progress
    distributed: DistributedFolder | None = None
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.summary = SummaryFile(self.folder)
        self.ranking = partial(ranking_scores, self.config.rank)

    def run(self, targets: Sequence[Target], costs: Sequence[float]) -> Summary:
        """Fold the targets one after the other; one that fails does not stop the others."""
        try:
            found = self._run(targets, costs)
        except BaseException:
            with suppress(WriteError):  # what stopped the run counts more
                self.summary.flush()
            raise
        self.summary.flush()
        if found.folded or not (self.folder.path / REPORT).exists():
            with suppress(InputError):  # nothing to show, because all failed
                write_report(self.folder.path, say=self.progress.line)
        return found

    def _run(self, targets: Sequence[Target], costs: Sequence[float]) -> Summary:
        folded: list[str] = []
        skipped: list[str] = []
        failed: list[tuple[str, str]] = []
        for number, (target, cost) in enumerate(zip(targets, costs, strict=True), 1):
            label = f"{number}/{len(targets)} {target.name}"
            try:
                results, done = self.fold(target, label, cost)
                if self.options.reference is not None:
                    self.compare(results, target, label, self.options.reference)
            except WriteError as error:
                missing = ", ".join(t.name for t in targets[number - 1 : number + 4])
                more = f" and {len(targets) - number - 4} more" if len(targets) > number + 4 else ""
                raise WriteError(
                    f"{error}. The run ends here; what was finished is kept, not finished: {missing}{more}"
                ) from error
            except (DistributedFoldError, WeightsError):
                raise
            except Exception as error:  # also a bug that one target brings to light: the others go on
                failed.append((target.name, reason(error, target)))
                self.progress.skip(cost)
                self.progress.line(f"error: {failed[-1][1]}", important=True)
                if debugging():
                    self.progress.line(traceback.format_exc(), important=True)
                continue
            (folded if done else skipped).append(target.name)
        return Summary(tuple(folded), tuple(skipped), tuple(failed))

    def fold(self, target: Target, label: str, cost: float) -> tuple[TargetResults, bool]:
        """Fold and write one target; tells whether there was anything to do."""
        say, warn = self.progress.line, partial(self.progress.line, important=True)
        for warning in target.warnings:
            warn(f"warning: {target.name}: {warning}")
        alignments: Sequence[ChainMsas] = [([], []) for _ in target.chains]
        if target.alignments is not None:
            alignments = target.alignments
        elif self.options.msa_dir is not None:
            alignments = load_alignments(self.options.msa_dir, target)
        results = self.folder.target(target)
        results.rank(self.ranking)
        jobs = self._jobs(target, alignments)
        share = cost / len(jobs)
        predictor: TargetPredictor | None = None
        coverage: dict[str, str | bytes] = {}
        done = False
        for number, job in enumerate(jobs):
            with ExitStack() as stack:
                if not stack.enter_context(results.claimed(job.id)):
                    say(
                        f"{label}: another process folds it by {job.network.name} with seed {job.seed}, skipped"
                    )
                    self.progress.skip(share)
                    continue
                found = None if self.options.overwrite else results.find(job.id)
                missing = None if found is None else self._wanted(target, job).missing(found)
                if found is not None and missing == {".png"}:
                    found = self._add(results, found, {".png": draw_plot(results, found)})
                    missing, done = set(), True
                if missing == set():
                    self.progress.skip(share)
                else:
                    if predictor is None:
                        predictor = self._predictor(target, alignments, jobs, label)
                        coverage = coverage_files(alignments, target, plots=self.config.plots)
                    if job.network not in self.networks:  # left out by now
                        self.progress.skip(share)
                        continue
                    done = True
                    found = self._predict(predictor, results, job, coverage, work=label, cost=share)
            if found is not None and stops(self.config, found.scores, target):
                self.progress.skip(share * (len(jobs) - number - 1))
                break
        done = self._relax(results, label) or done
        if self.options.overwrite:
            kept = {job.id for job in jobs}
            results.remove(record.id for record in results.records() if record.id not in kept)
            results.rank(self.ranking)
        self.summary.update(results)
        if not done:
            say(f"{label}: finished before with the same input and settings, skipped")
        elif records := results.records():
            best = records[0]
            shown = ", ".join(
                f"{name} {best.scores[key]:.{digits}f}"
                for name, key, digits in (("pLDDT", "plddt", 1), ("pTM", "ptm", 2), ("ipTM", "iptm", 2))
                if best.scores.get(key) is not None
            )
            count = f"{len(records)} prediction{'s' if len(records) > 1 else ''}"
            say(f"{label}: {shown} by {best.key}, best of {count} in {self.folder.path}")
        return results, done

    def _jobs(self, target: Target, alignments: Sequence[ChainMsas]) -> list[_Job]:
        return [
            _Job(n, s, run_record(target, alignments, n, s, self.config, device=str(self.device)))
            for n in suitable(self.networks, target)
            for s in self.config.seeds
        ]

    def _wanted(self, target: Target, job: _Job) -> Wanted:
        """The files that a prediction shall have."""
        config, heads = self.config, job.network.info.config.model.heads
        return Wanted(
            plots=config.plots,
            pae=keeps_pae(target.num_residues, config.pae) and bool(heads.predicted_aligned_error.weight),
            representations=config.save_representations,
            recycles=config.save_recycles,
        )

    def _predictor(
        self, target: Target, alignments: Sequence[ChainMsas], jobs: Sequence[_Job], label: str
    ) -> TargetPredictor:
        """Check the networks and plan the target's fold by each of them."""
        self._check_networks()
        networks = [n for n in dict.fromkeys(job.network for job in jobs) if n in self.networks]
        self._announce(target, label, alignments, networks)
        return TargetPredictor(
            target,
            [network.load(self.config.precision) for network in networks],
            alignments,
            self.config,
            device=self.device,
            say=partial(self.progress.line, important=True),
            run=None if self.distributed is None else self.distributed.run,
        )

    def _predict(
        self,
        predictor: TargetPredictor,
        results: TargetResults,
        job: _Job,
        more: Mapping[str, str | bytes],
        *,
        work: str,
        cost: float,
    ) -> PredictionRecord:
        """Make one prediction and write it, with more files."""
        model = job.network.load(self.config.precision)
        work = f"{work} {model.name}" + (f" seed {job.seed}" if len(self.config.seeds) > 1 else "")
        start = time.monotonic()
        with (
            peak_memory(self.device) as peak,
            self.progress.passes(
                work, apply_settings(self.config, model.config).model.num_recycle, cost
            ) as on_cycle,
        ):
            prediction = predictor.predict(model, job.seed, on_cycle)
            most = peak()
        took = {
            "seconds": round(time.monotonic() - start, 1),
            "peak_memory": None if most is None else round(most / 2**20),
        }
        return write_prediction(results, job.record, prediction, took, self.config, more=more)

    def _check_networks(self) -> None:
        """Before the first fold, load all networks: one that cannot be used ends the run, or is left out."""
        if self._checked:
            return
        for network in list(self.networks):
            try:
                network.load(self.config.precision)
            except WeightsError as error:
                if not self.options.skip_bad_weights or len(self.networks) == 1:
                    raise
                self.progress.line(f"warning: left out: {error}", important=True)
                self.networks.remove(network)
        self._checked = True

    def _relax(self, results: TargetResults, label: str) -> bool:
        """Relax the best prediction or all, as asked; tells whether there was anything to do."""
        if self.config.relax == "none":
            return False
        from fastfold.inference.relax.written import relax_results

        chosen = results.records()[: 1 if self.config.relax == "best" else None]
        relaxation = RelaxConfig(platform=self.config.relax_platform)
        done = False
        for record, outcome, relaxed in relax_results(results, chosen, self.ranking, relaxation):
            self.progress.line(f"{label} {record.key}: {outcome}", important=not relaxed)
            done = True
        return done

    def _add(
        self, results: TargetResults, record: PredictionRecord, files: dict[str, str | bytes]
    ) -> PredictionRecord:
        """Add files to a finished prediction."""
        return results.add(record.id, record.key, files, record.scores, self.ranking)

    def compare(self, results: TargetResults, target: Target, label: str, reference: Path) -> None:
        """Compare a finished target with its experimental structure, if there is one."""
        path = find_reference(reference, target.name)
        if path is None:
            self.progress.line(
                f"warning: {target.name}: no structure of this name in {reference}", important=True
            )
            return
        best = next(iter(compare_target(self.folder.path, results.stem, path).values()))
        self.progress.line(
            f"{label}: against {path.name}: TM-score {best.tm_score:.3f}, lDDT-CA {best.lddt_ca:.3f}, "
            f"GDT-TS {best.gdt_ts:.3f}, {best.aligned_residues} of {best.reference_residues} residues"
        )

    def _announce(
        self, target: Target, label: str, alignments: Sequence[ChainMsas], networks: Sequence[Network]
    ) -> None:
        """Say what a target is folded from, and by which networks."""
        say, warn = self.progress.line, partial(self.progress.line, important=True)
        rows = [sum(len(msa.sequences) for group in pair for msa in group) for pair in alignments]
        for chain, count in zip(target.chains, rows, strict=True):
            if self.options.msa_dir is not None and target.alignments is None and not count:
                what = f"chain {chain.id}" if target.is_complex else repr(target.record)
                warn(
                    f"warning: {target.name}: no alignment of {what} in {self.options.msa_dir}; its sequence alone is "
                    "used"
                )
        evidence = f"{sum(rows):,} alignment rows" if any(rows) else "no alignment, from the sequence alone"
        if self.config.pae is None and not keeps_pae(target.num_residues, None):
            say(
                f"{label}: aligned errors of all pairs are left out of so long a target; --pae yes writes them"
            )
        if target.is_complex and not all(network.info.multimer for network in networks):
            warn(
                f"warning: {target.name}: a complex folded by a monomer network, as one chain whose residue numbers "
                "jump by 200 between the chains; --weights of a multimer network (params_model_1_multimer_v3.npz and "
                "the like) is made for complexes"
            )
        names = ", ".join(network.name for network in networks)
        seeds = f", {len(self.config.seeds)} seeds" if len(self.config.seeds) > 1 else ""
        say(f"{label}: {target.num_residues:,} residues, {evidence}, by {names}{seeds}")


def _cost(target: Target, networks: Sequence[Network], config: InferConfig) -> float:
    """Work of a target in arbitrary units: cubic in its length, and short targets take their time too."""
    n = target.num_residues
    passes = sum(
        apply_settings(config, network.info.config).model.num_recycle + 1 for network in networks
    ) * len(config.seeds)
    return passes * float(n + 50) ** 2 * (n + 500)
