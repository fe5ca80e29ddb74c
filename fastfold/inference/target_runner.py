"""Fold one target of a run: find missing predictions in the folder, and make them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from fastfold.data.msa.find import ChainMsas, TargetRows, target_rows
from fastfold.data.msa.sampling import chains_without_rows, cut_alignments
from fastfold.data.search.settings import select_rows
from fastfold.data.targets import Target
from fastfold.data.templates.source import TemplateFinder
from fastfold.errors import WeightsError, WriteError
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder
from fastfold.inference.embedding.compute import write_bioemu
from fastfold.inference.folding.background import Background, BackgroundWork
from fastfold.inference.folding.batch import Answer, BatchFolder, Request
from fastfold.inference.folding.kept_networks import KeptNetworks
from fastfold.inference.folding.prediction_jobs import PredictionJob, prediction_jobs
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.folding.schedule import Awaited, Schedule, Start
from fastfold.inference.folding.target_lines import announce, conclusion, count_of, report_geometry
from fastfold.inference.models import Network, suitable
from fastfold.inference.output.plots import confidence_png, coverage_png
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.output.results_folder import PredictionRecord, ResultsFolder, TargetResults
from fastfold.inference.output.score_files import lines_json
from fastfold.inference.output.target_files import renew_result_archive, write_alphafold_folder
from fastfold.inference.output.writer import (
    coverage_title,
    draw_missing_coverage,
    draw_plot,
    find_coverage,
    ranking_scores,
    stops,
    write_result,
)
from fastfold.inference.planning.cuda_graph import KeptGraph
from fastfold.inference.progress import Progress
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.request import RunOptions
from fastfold.inference.sampling.samples import left_out_depths
from fastfold.inference.target_templates import TargetTemplates, find_templates
from fastfold.utils.device import peak_memory
from fastfold.utils.packages import is_installed, missing


@dataclass
class _Prepared:
    """Shared data of a target's predictions."""

    predictor: TargetPredictor  #: Predictor of the target
    coverage: dict[str, Any] | None  #: Its coverage by alignments; None without them, or once it is written
    label: str  #: Name of the target in messages


@dataclass(frozen=True, eq=False)
class TargetWork:
    """Target to fold."""

    target: Target  #: The target
    label: str  #: Name of the target in messages
    cost: float  #: Cost of the target in the progress


class FoldedTarget(NamedTuple):
    """Result of a target."""

    results: TargetResults  #: Its results in the folder
    made: bool  #: True if a file was added
    in_progress: int  #: Number of predictions that other processes are working on
    #: The ``id`` of each requested prediction, also of those that were finished before
    predictions: tuple[str, ...] = ()


Ended = tuple[TargetWork, FoldedTarget | Exception]


@dataclass
class TargetRunner:
    """Runner that folds targets into a results folder, alone or several in a pass."""

    networks: list[Network]  #: Networks of the run; an invalid one may be left out
    folder: ResultsFolder  #: The results folder
    device: torch.device  #: Device of the fold
    config: InferConfig  #: Settings of the fold
    options: RunOptions  #: Options of the run other than the model's
    progress: Progress  #: Progress shown to the user
    distributed: DistributedFolder | None = None  #: Processes that fold together, if there are several
    finder: TemplateFinder | None = None  #: Finder of templates; None if none were requested
    background: Background | None = None  #: Process that draws and relaxes; None to do so between folds
    #: True to leave plots, relaxation, and files made from them to :meth:`finish` in another process
    leaves_rest: bool = False
    kept: KeptNetworks = field(default_factory=KeptNetworks)  #: Networks that stay on the device
    _checked: bool = field(default=False, init=False)
    _graph: KeptGraph = field(init=False)
    _batches: BatchFolder = field(init=False)

    def __post_init__(self) -> None:
        self.ranking = partial(ranking_scores, self.config.rank)
        self._graph = KeptGraph(is_required=bool(self.config.cuda_graphs))
        self._batches = BatchFolder(lambda line: self.progress.line(line, important=True))
        if self.config.plots and not is_installed("matplotlib"):
            self.config = replace(self.config, plots=False)
            self.progress.line(
                f"warning: no plots are drawn: they need {missing('matplotlib')}", important=True
            )

    def fold_groups(self, groups: Iterable[Sequence[TargetWork]]) -> Generator[Ended, None, None]:
        """Fold groups of targets, and draw and relax them meanwhile; yield each with its result or its error."""
        # Each process has another target ready when it ends one, also during a long fold.
        ahead = 2 * (1 + (0 if self.background is None else self.background.processes))
        schedule = Schedule[TargetWork, FoldedTarget](self._batches, self.background)
        with contextlib.closing(schedule):
            for group in groups:
                yield from schedule.wait(ahead)
                yield from schedule.fold([(work, self.steps(work)) for work in group])
            yield from schedule.wait(1)

    def steps(self, work: TargetWork) -> Generator[Awaited, Any, FoldedTarget]:
        """Fold and write one target; yield requests for its predictions."""
        target, label = work.target, work.label
        for warning in target.warnings:
            self.progress.line(f"warning: {target.name}: {warning}", important=True)
        rows = target_rows(self.options.msa_dir, target)
        if target.is_complex:
            rows = rows._replace(chains=select_rows(rows.chains, self.options.pair_mode))
        results = self.folder.target(target)
        results.rank(self.ranking)
        try:
            return (yield from self._fold(work, results, rows))
        except Exception:
            with contextlib.suppress(WriteError):  # the error that ended the fold is reported
                self._renew_archive(results, label)
            raise

    def _fold(
        self, work: TargetWork, results: TargetResults, rows: TargetRows
    ) -> Generator[Awaited, Any, FoldedTarget]:
        """Fold a target with alignments of its whole chains, and write its results."""
        target, label, cost = work.target, work.label, work.cost
        config = replace(self.config, seeds=target.seeds) if target.seeds else self.config
        alignments = rows.chains
        networks = suitable(self.networks, target)
        templates = find_templates(self.finder, target, alignments, networks, self.options.msa_dir)
        if target.is_cut:
            alignments = self._cut(target, alignments)
            templates = None if templates is None else templates.cut(target)
        jobs = prediction_jobs(
            target,
            alignments,
            networks=networks,
            templates=templates,
            config=config,
            device=self.device,
            alignment_files=rows.files,
        )
        share = cost / len(jobs)
        prepare = cache(partial(self._prepare, target, alignments, templates, jobs, label, config))
        done, in_progress = False, 0
        for number, job in enumerate(jobs):
            with results.claimed(job.id) as mine:
                if mine:
                    wanted = job.wanted(target, self.config, self.folder.output_format)
                    completed, made = yield from self._complete(results, job, wanted, prepare, share)
                    done = done or made
                else:
                    completed, in_progress = None, in_progress + 1
                    self.progress.skip(share)
                    self.progress.line(
                        f"{label}: another process folds it by {job.network.name} with {job.label}, skipped"
                    )
            if completed is not None and stops(self.config, completed.scores, target):
                self.progress.skip(share * (len(jobs) - number - 1))
                break
        if self.options.overwrite:
            kept = {job.id for job in jobs}
            results.remove(record.id for record in results.records() if record.id not in kept)
            results.rank(self.ranking)
        if not self.leaves_rest:
            done = (yield from self._finish(results, label)) or done
        self._conclude(results, target, label, done)
        return FoldedTarget(results, done, in_progress, tuple(job.id for job in jobs))

    def _cut(self, target: Target, whole: Sequence[ChainMsas]) -> Sequence[ChainMsas]:
        """Return the parts of alignments that the target is, with a warning for each chain without a row."""
        alignments = cut_alignments(target, whole)
        for chain in chains_without_rows(target, whole, alignments):
            self.progress.line(
                f"warning: {target.name}: no alignment row has a residue in the parts of chain {chain}; only its "
                "sequence is used",
                important=True,
            )
        return alignments

    def _conclude(self, results: TargetResults, target: Target, label: str, done: bool) -> None:
        if not done:
            self.progress.line(f"{label}: finished before with the same input and settings, skipped")
            return
        records = results.records()
        what = conclusion(records) if self.config.embed is None else f"embedded by {count_of(records)}"
        report_geometry(self.progress, target.name, records)
        self.progress.line(f"{label}: {what} in {results.folder}")

    def finish(self, target: Target, predictions: Sequence[str], *, made: bool) -> bool:
        """Draw and relax predictions, by their ``id``, after a runner with ``leaves_rest``; True if files are new."""
        results = self.folder.target(target)
        schedule: Schedule[str, bool] = Schedule(self._batches, None)
        ((_, done),) = schedule.fold([(target.name, self._rest(results, target, predictions, made=made))])
        if isinstance(done, Exception):
            raise done
        return done

    def _rest(
        self, results: TargetResults, target: Target, predictions: Sequence[str], *, made: bool
    ) -> Generator[Awaited, Any, bool]:
        drawn = False
        if self.config.plots and self.config.embed is None:
            again = made and self.options.overwrite
            for record in results.records():
                if record.id in predictions and (again or ".png" not in record.files):
                    self._draw(results, record)
                    drawn = True
            drawn = draw_missing_coverage(results, target.name, again=again) or drawn
        return (yield from self._finish(results, target.name)) or drawn

    def _finish(self, results: TargetResults, label: str) -> Generator[Awaited, Any, bool]:
        """Relax predictions, and write the files that are made from all others; return True if one was relaxed."""
        relaxed = yield from self._relax(results, label)
        if self.folder.output_format == "colabfold":
            write_alphafold_folder(results)
        if self.config.embed is not None and self.config.embed.file_format == "bioemu" and results.records():
            write_bioemu(results)
        self._renew_archive(results, label)
        return relaxed

    def _renew_archive(self, results: TargetResults, label: str) -> None:
        """Write a target's archive if it is requested, or if an earlier one differs from the files."""
        is_wanted = self.options.zip_results
        if renew_result_archive(results, is_wanted=is_wanted) and not is_wanted:
            self.progress.line(f"{label}: renewed its archive, which an earlier run wrote")

    def _complete(
        self,
        results: TargetResults,
        job: PredictionJob,
        wanted: set[str],
        prepare: Callable[[], _Prepared],
        cost: float,
    ) -> Generator[Awaited, Any, tuple[PredictionRecord | None, bool]]:
        """Complete one prediction; return it (None if its network was left out), and True if changed."""
        record = None if self.options.overwrite else results.find(job.id)
        if record is not None and (missing := wanted - record.files.keys()) <= {".png"}:
            self.progress.skip(cost)
            if missing:
                record = self._draw(results, record)
            return record, bool(missing)
        prepared = prepare()
        if job.network not in self.networks:  # left out in the meantime
            self.progress.skip(cost)
            return None, False
        return (yield from self._predict(prepared, results, job, cost)), True

    def _draw(self, results: TargetResults, record: PredictionRecord) -> PredictionRecord:
        picture: dict[str, str | bytes] = {".png": draw_plot(results, record)}
        return results.add(record.id, record.key, picture, record.scores, self.ranking)

    def _prepare(
        self,
        target: Target,
        alignments: Sequence[ChainMsas],
        templates: TargetTemplates | None,
        jobs: Sequence[PredictionJob],
        label: str,
        config: InferConfig,
    ) -> _Prepared:
        """Check the networks and plan the target's fold by each of them."""
        self._check_networks()
        networks = [n for n in dict.fromkeys(job.network for job in jobs) if n in self.networks]
        announce(self.progress, target, label, alignments, networks, config, msa_dir=self.options.msa_dir)
        if beyond := left_out_depths(self.config.sample, [job.sample for job in jobs]):
            depths = ", ".join(f"{depth:,}" for depth in beyond)
            self.progress.line(f"{label}: no sample of {depths} rows, because the alignment has fewer")
        if templates is not None:
            for line in templates.lines:
                self.progress.line(f"{label}: {line}", important=not templates.number)
        predictor = TargetPredictor(
            target,
            [network.load(self.config.precision) for network in networks],
            alignments,
            config,
            device=self.device,
            templates=templates,
            say=partial(self.progress.line, important=True),
            distributed=self.distributed,
            graph=self._graph,
            kept=self.kept if self.distributed is None else None,
        )
        return _Prepared(predictor, find_coverage(alignments, target), label)

    def _predict(
        self, prepared: _Prepared, results: TargetResults, job: PredictionJob, cost: float
    ) -> Generator[Awaited, Any, PredictionRecord]:
        """Make and write one prediction; with the first, write the files about the target's coverage."""
        model = job.network.load(self.config.precision)
        work = f"{prepared.label} {model.name}"
        if len(prepared.predictor.config.seeds) > 1 or job.sample is not None:
            work += f" {job.label}"
        num_recycles = prepared.predictor.num_recycles(model)
        with peak_memory(self.device) as peak, self.progress.passes(work, num_recycles, cost) as on_cycle:
            state = self._state(results, job, prepared.label)
            pictures: list[Future[bytes]] = []
            # Ranks compute the scores of a draft together, so one alone cannot.
            background = None if self.distributed is not None else self.background

            def watch(cycle: int, pass_results: dict[str, Any]) -> None:
                on_cycle(cycle, pass_results)
                if self.config.plots and background is not None and "draft" in pass_results:
                    pictures.append(background.submit(_plot(pass_results["draft"]())))

            request = Request(prepared.predictor, model, job.seed, watch, state, sample=job.sample)
            answer: Answer = yield request
            most = peak()
        result = answer.result
        memory = None if most is None else round(most / 2**20)
        took = {"seconds": round(answer.seconds, 1), "peak_memory": memory}
        files = {} if job.sample is None else job.sample.files()
        if isinstance(result, Prediction):
            self._say_restraints(work, result)
            if self.config.plots and not pictures:
                pictures.append((yield Start(_plot(result))))
            yield from self._write_coverage(prepared, results)
            files = {**result.files(plots=False, output_format=results.parent.style), **files}
            if pictures:
                files[".png"] = yield pictures[-1]
        made = job.record | ({"batch": answer.shared} if answer.shared > 1 else {})
        record = write_result(results, made, result, took, self.config, files=files)
        state.remove()
        return record

    def _say_restraints(self, work: str, result: Prediction) -> None:
        if (restraints := result.restraints) is not None:
            line = (
                f"{work}: {restraints['satisfied']} of {restraints['total']} restraints hold, "
                f"{restraints['satisfied_before']} before"
            )
            if restraints["doubtful"]:
                line += "; the network's distances speak against them, check the file"
            self.progress.line(line, important=restraints["doubtful"])
        for one in result.forced_templates:
            near, residues = one["within"], one["residues"]
            self.progress.line(
                f"{work}: {near} of {residues} residues within {one['threshold']:g} Å of {one['name']}, "
                f"chain {one['chain']}",
                important=near != residues,
            )

    def _write_coverage(self, prepared: _Prepared, results: TargetResults) -> Generator[Awaited, Any, None]:
        """Write the coverage of a target by its alignments, and its plot, once per run."""
        coverage, prepared.coverage = prepared.coverage, None
        if coverage is None:
            return
        files: dict[str, str | bytes] = {"_coverage.json": lines_json(coverage)}
        if self.config.plots:
            title = coverage_title(prepared.predictor.target.name)
            files["_coverage.png"] = yield BackgroundWork(coverage_png, (coverage,), {"title": title})
        results.write_shared(files)

    def _state(self, results: TargetResults, job: PredictionJob, label: str) -> RecycleState:
        ranks = 1 if self.distributed is None else self.distributed.ranks
        return RecycleState(
            results.state / f"{job.id}.state",
            f"{job.id} {self.device} {ranks} {self.config.save_recycles}",
            after=self.config.checkpoint_after,
            say=lambda line: self.progress.line(f"{label}: {line}", important=True),
            random=self.config.dropout,
        )

    def _check_networks(self) -> None:
        """Load all networks before the first fold; an invalid one ends the run, or is left out."""
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

    def _relax(self, results: TargetResults, label: str) -> Generator[Awaited, Any, bool]:
        if self.config.relax == "none":
            return False
        from fastfold.inference.relax.files import relax_in_folder

        number = self.config.num_relax or (1 if self.config.relax == "best" else None)
        chosen = [record.id for record in results.records()[:number] if "relaxation" not in record.scores]
        if not chosen:
            return False
        self.progress.note(f"{label}: relaxing")
        processes = 1 if self.background is None else self.background.processes
        threads = max(1, torch.get_num_threads() // processes)
        relaxation = RelaxConfig(platform=self.config.relax_platform, threads=threads)
        where = (results.parent.path, results.parent.output_format, (results.stem, results.state))
        relaxed = yield BackgroundWork(relax_in_folder, (*where, chosen, self.ranking, relaxation), {})
        for key, outcome, is_relaxed in relaxed:
            self.progress.line(f"{label} {key}: {outcome}", important=not is_relaxed)
        return bool(relaxed)


def _plot(prediction: Prediction) -> BackgroundWork:
    return BackgroundWork(confidence_png, (), prediction.plot_arguments())


def fold_together(group: Sequence[tuple[TargetRunner, TargetWork]]) -> Generator[Ended, None, None]:
    """Fold and write targets with the runner of each one's folder, by the same networks in shared passes.

    Yields:
        Each target with its result or its error, in the order in which they are finished.
    """

    def say(line: str) -> None:
        for runner, _ in group:
            runner.progress.line(line, important=True)

    with contextlib.closing(Schedule[TargetWork, FoldedTarget](BatchFolder(say), None)) as schedule:
        yield from schedule.fold([(work, runner.steps(work)) for runner, work in group])
