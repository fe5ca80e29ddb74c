"""``fastfold infer``: fold every target of some FASTA files and write what was found."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fastfold.data.fasta import read_targets
from fastfold.data.features.pipeline import featurize
from fastfold.data.msa.find import load_alignments
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.precision import Precision
from fastfold.inference.distributed import DistributedFolder, DistributedFoldError, distributed_folder
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding import fold, keeps_pae
from fastfold.inference.models import MINI, Network, about_mini, open_networks, suitable
from fastfold.inference.output.completion import CompletionMarker
from fastfold.inference.output.evaluate import compare_target, find_reference
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.writer import Alignments, run_record, write_target
from fastfold.inference.planning.available_memory import check_fits
from fastfold.inference.planning.planner import FoldPlan
from fastfold.inference.planning.retry import fold_model
from fastfold.inference.progress import Progress
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.device import choose_device


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run, besides the inputs and the weights.

    Attributes:
        num_recycles: Extra passes; None for each network's own number.
        seed: Seed of everything random.
        precision: ``fp32`` or ``bf16``.
        plots: Whether pictures are drawn.
        pae: Whether aligned errors of all pairs are kept and written; None for short targets only
            (:func:`~fastfold.inference.folding.keeps_pae`).
    """

    num_recycles: int | None = None
    seed: int = 0
    precision: Precision = "fp32"
    plots: bool = True
    pae: bool | None = None


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        folded: Names of the targets folded now.
        skipped: Names of those that were finished before.
        failed: Name (or file) and reason of each that failed.
    """

    folded: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


def run(
    inputs: Sequence[Path],
    output: Path,
    weights: Sequence[Path],
    *,
    msa_dir: Path | None = None,
    complex_: bool = False,
    reference: Path | None = None,
    device: str = "auto",
    settings: Settings | None = None,
    parallel: str | None = None,
    memory_budget: int | None = None,
) -> Summary:
    """Fold all targets, each by every network that suits it, best prediction first.

    A target whose files are there from an earlier run with the same inputs, settings and weights is skipped; one
    that fails is reported and the others go on. With ``FASTFOLD_DEBUG=1`` in the environment the traceback of each
    failure is shown.

    Args:
        inputs: FASTA files.
        output: Folder for the results.
        weights: Weights files; none for the small network that ships with the package.
        msa_dir: Folder of alignments; None to fold from the sequences alone.
        complex_: Each file is one complex.
        reference: Experimental structures to compare with: a file, or a folder of files named like the targets.
        device: ``auto``, ``cpu`` or ``cuda``.
        settings: See :class:`Settings`.
        parallel: ``dap=<number>``: so many processes fold each target together; see
            :mod:`fastfold.inference.distributed`. On all but the first the summary is empty.
        memory_budget: Bytes that a fold may take; None for what the device has free.

    Raises:
        FastFoldError: Nothing can be folded at all: unusable weights, folders, or device.
    """
    where = choose_device(device)
    with distributed_folder(parallel, where) as distributed:
        if distributed is None:
            rest = (complex_, reference, where, settings, None, memory_budget)
            return _run(inputs, output, weights, msa_dir, *rest)
        if not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return Summary((), (), ())
        try:
            where = distributed.context.device
            summary = _run(
                inputs, output, weights, msa_dir, complex_, reference, where, settings, distributed
            )
        except DistributedFoldError:
            raise  # the others do not listen
        except Exception:
            distributed.stop()
            raise
        distributed.stop()
        return summary


def _run(
    inputs: Sequence[Path],
    output: Path,
    weights: Sequence[Path],
    msa_dir: Path | None,
    complex_: bool,
    reference: Path | None,
    where: torch.device,
    settings: Settings | None,
    distributed: DistributedFolder | None = None,
    memory_budget: int | None = None,
) -> Summary:
    """:func:`run` on the process that reads and writes."""
    settings = settings or Settings()
    if msa_dir is not None and not msa_dir.is_dir():
        raise InputError("no such folder; give the one that holds the alignments", path=msa_dir)
    if reference is not None:
        find_reference(reference, "")
    networks = open_networks(weights or [Path(MINI)])
    targets, errors = read_targets(inputs, complex_=complex_)
    if targets:
        prepare_output_directory(output)
    failed: list[tuple[str, str]] = [("", str(error)) for error in errors]
    folded: list[str] = []
    skipped: list[str] = []
    costs = [_cost(target, suitable(networks, target), settings) for target in targets]
    with Progress(sum(costs)) as progress:
        runner = _Runner(networks, output, msa_dir, where, settings, progress, distributed, memory_budget)
        if not weights:
            progress.line(about_mini(networks[0]))
        for error in errors:
            progress.line(f"error: {error}")
        for number, (target, cost) in enumerate(zip(targets, costs, strict=True), 1):
            label = f"{number}/{len(targets)} {target.name}"
            try:
                done = runner.fold(target, label, cost)
                if reference is not None:
                    runner.compare(target, label, reference)
            except DistributedFoldError:
                raise
            except Exception as error:  # also a bug that one target brings to light: the others go on
                failed.append((target.name, reason(error, target)))
                progress.skip(cost)
                progress.line(f"error: {failed[-1][1]}")
                if debugging():
                    progress.line(traceback.format_exc())
                continue
            (folded if done else skipped).append(target.name)
    return Summary(tuple(folded), tuple(skipped), tuple(failed))


@dataclass(frozen=True)
class _Runner:
    """What all targets of a run share."""

    networks: Sequence[Network]
    output: Path
    msa_dir: Path | None
    device: torch.device
    settings: Settings
    progress: Progress
    distributed: DistributedFolder | None = None
    memory_budget: int | None = None

    def fold(self, target: Target, label: str, cost: float) -> bool:
        """Fold and write one target; False if it was finished before."""
        say = self.progress.line
        for warning in target.warnings:
            say(f"warning: {target.name}: {warning}")
        networks = suitable(self.networks, target)
        if not networks:
            raise ConfigError(
                f"{target.name} is a complex of {len(target.chains)} chains, and the weights given are of monomer "
                "networks; add --weights of a multimer network (params_model_1_multimer_v3.npz and the like), or "
                "give its chains as separate FASTA records to fold them alone"
            )
        self._check_fits(target, networks, alignment_rows=1)  # hopeless ones before their alignments are read
        alignments: Alignments = [([], []) for _ in target.chains]
        if self.msa_dir is not None:
            alignments = list(load_alignments(self.msa_dir, target))
        rows = [sum(len(msa.sequences) for group in pair for msa in group) for pair in alignments]
        self._check_fits(target, networks, alignment_rows=sum(rows))
        record = run_record(target, alignments, networks, asdict(self.settings), device=str(self.device))
        if CompletionMarker.is_complete(self.output, target.name, record["input_hash"]):
            self.progress.skip(cost)
            say(f"{label}: finished before with the same input and settings, skipped")
            return False
        for chain, count in zip(target.chains, rows, strict=True):
            if self.msa_dir is not None and not count:
                what = f"chain {chain.id}" if target.is_complex else repr(target.record)
                say(
                    f"warning: {target.name}: no alignment of {what} in {self.msa_dir}; its sequence alone is used"
                )
        evidence = f"{sum(rows):,} alignment rows" if any(rows) else "no alignment, from the sequence alone"
        if self.settings.pae is None and not keeps_pae(target.num_residues, None):
            say(
                f"{label}: aligned errors of all pairs are left out of so long a target; --pae yes writes them"
            )
        names = ", ".join(network.name for network in networks)
        say(f"{label}: {target.num_residues:,} residues, {evidence}, by {names}")
        predictions = [
            self._predict(target, label, alignments, network, cost / len(networks)) for network in networks
        ]
        predictions.sort(key=lambda p: p.ranking_confidence, reverse=True)
        count = write_target(self.output, target.name, record, predictions, plots=self.settings.plots)
        best = predictions[0]
        scores = {"pLDDT": f"{best.mean_plddt:.1f}"}
        scores |= {name: f"{s:.2f}" for name, s in (("pTM", best.ptm), ("ipTM", best.iptm)) if s is not None}
        shown = ", ".join(f"{name} {score}" for name, score in scores.items())
        say(f"{label}: {shown} by {best.model_name}, {count} files in {self.output}")
        return True

    def compare(self, target: Target, label: str, reference: Path) -> None:
        """Compare a finished target with its experimental structure, if there is one."""
        path = find_reference(reference, target.name)
        if path is None:
            self.progress.line(f"warning: {target.name}: no structure of this name in {reference}")
            return
        best = next(iter(compare_target(self.output, target.name, path).values()))
        self.progress.line(
            f"{label}: against {path.name}: TM-score {best.tm_score:.3f}, lDDT-CA {best.lddt_ca:.3f}, "
            f"GDT-TS {best.gdt_ts:.3f}, {best.aligned_residues} of {best.reference_residues} residues"
        )

    def _check_fits(self, target: Target, networks: Sequence[Network], alignment_rows: int) -> None:
        if self.distributed is not None:
            return  # the estimate is that of one process
        for network in networks:
            check_fits(
                network.info.config,
                target.num_residues,
                self.device,
                element_size=2 if self.settings.precision == "bf16" else 4,
                name=target.name,
                alignment_rows=alignment_rows,
                templates=0,
                budget=self.memory_budget,
            )

    def _predict(
        self, target: Target, label: str, alignments: Alignments, network: Network, cost: float
    ) -> Prediction:
        work = f"{label} {network.name}"
        self.progress.begin(work)
        model = network.load(self.device, self.settings.precision)
        sampler = featurize(target.chains, alignments, model.config, seed=self.settings.seed)
        recycles = _recycles(network, self.settings)
        passes = 0
        rows = sum(len(msa.sequences) for pair in alignments for group in pair for msa in group)

        def on_cycle(cycle: int, found: dict[str, Any]) -> None:
            nonlocal passes
            passes += 1
            status = f"recycle {cycle}/{recycles} pLDDT {found['mean_plddt']:.1f}"
            self.progress.step(work, status, cost / (recycles + 1))

        def by(plan: FoldPlan | None) -> Prediction:
            nonlocal passes
            self.progress.skip(-cost * passes / (recycles + 1))  # of an attempt that ran out of memory
            passes = 0
            return fold(
                model,
                sampler,
                target.chains,
                name=target.name,
                model_name=network.name,
                seed=self.settings.seed,
                num_recycles=recycles,
                on_cycle=on_cycle,
                run=None if self.distributed is None else self.distributed.run,
                plan=plan,
                pae=keeps_pae(target.num_residues, self.settings.pae),
            )

        try:
            if self.distributed is not None:
                prediction = by(None)
            else:
                prediction = fold_model(
                    by,
                    model,
                    target.num_residues,
                    self.memory_budget,
                    name=target.name,
                    say=self.progress.line,
                    rows=rows,
                    templates=0,
                )
        finally:
            network.rest()
        self.progress.skip(cost * (1 - passes / (recycles + 1)))
        return prediction


def _recycles(network: Network, settings: Settings) -> int:
    own = network.info.config.model.num_recycle
    return own if settings.num_recycles is None else settings.num_recycles


def _cost(target: Target, networks: Sequence[Network], settings: Settings) -> float:
    """Work of a target in arbitrary units: cubic in its length, and short targets take their time too."""
    n = target.num_residues
    return sum(_recycles(network, settings) + 1 for network in networks) * float(n + 50) ** 2 * (n + 500)
