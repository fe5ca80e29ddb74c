"""``fastfold infer``: fold every target of some FASTA files and write what was found."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastfold.data.msa.find import ChainMsas, load_alignments
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder, DistributedFoldError, distributed_folder
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.folding import OnCycle, keeps_pae, predict_target
from fastfold.inference.models import MINI, Network, about_mini, open_networks, suitable
from fastfold.inference.output.completion import CompletionMarker
from fastfold.inference.output.evaluate import compare_target, find_reference
from fastfold.inference.output.writer import run_record, write_target
from fastfold.inference.progress import Progress
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.device import choose_device


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
    config: InferConfig | None = None,
    *,
    msa_dir: Path | None = None,
    complex_: bool = False,
    reference: Path | None = None,
) -> Summary:
    """Fold all targets, each by every network that suits it, best prediction first.

    A target whose files are there from an earlier run with the same inputs, settings and weights is skipped; one
    that fails is reported and the others go on. With ``FASTFOLD_DEBUG=1`` in the environment the traceback of each
    failure is shown.

    Args:
        inputs: FASTA files.
        output: Folder for the results.
        weights: Weights files; none for the small network that ships with the package.
        config: How to fold.
        msa_dir: Folder of alignments; None to fold from the sequences alone.
        complex_: Each file is one complex.
        reference: Experimental structures to compare with: a file, or a folder of files named like the targets.

    Returns:
        How the run ended. It is empty on all but the first of several processes that fold together.

    Raises:
        FastFoldError: Nothing can be folded at all: unusable weights, folders, or device.
    """
    config = config or InferConfig()
    where = choose_device(config.device)
    with distributed_folder(config.parallel, where) as distributed, _leading(distributed):
        if distributed is not None and not distributed.context.is_rank_zero:
            distributed.worker_loop()
            return Summary((), (), ())
        if msa_dir is not None and not msa_dir.is_dir():
            raise InputError("no such folder; give the one that holds the alignments", path=msa_dir)
        if reference is not None:
            find_reference(reference, "")
        networks = open_networks(weights or [Path(MINI)])
        targets, errors = read_targets(inputs, complex_=complex_)
        if targets:
            prepare_output_directory(output)
        costs = [_cost(target, suitable(networks, target), config) for target in targets]
        with Progress(sum(costs)) as progress:
            device = where if distributed is None else distributed.context.device
            runner = _Runner(networks, output, msa_dir, reference, device, config, progress, distributed)
            if not weights:
                progress.line(about_mini(networks[0]))
            for error in errors:
                progress.line(f"error: {error}")
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
class _Runner:
    """What all targets of a run share."""

    networks: Sequence[Network]
    output: Path
    msa_dir: Path | None
    reference: Path | None
    device: torch.device
    config: InferConfig
    progress: Progress
    distributed: DistributedFolder | None = None

    def run(self, targets: Sequence[Target], costs: Sequence[float]) -> Summary:
        """Fold the targets one after the other; one that fails does not stop the others."""
        folded: list[str] = []
        skipped: list[str] = []
        failed: list[tuple[str, str]] = []
        for number, (target, cost) in enumerate(zip(targets, costs, strict=True), 1):
            label = f"{number}/{len(targets)} {target.name}"
            try:
                done = self.fold(target, label, cost)
                if self.reference is not None:
                    self.compare(target, label, self.reference)
            except DistributedFoldError:
                raise
            except Exception as error:  # also a bug that one target brings to light: the others go on
                failed.append((target.name, reason(error, target)))
                self.progress.skip(cost)
                self.progress.line(f"error: {failed[-1][1]}")
                if debugging():
                    self.progress.line(traceback.format_exc())
                continue
            (folded if done else skipped).append(target.name)
        return Summary(tuple(folded), tuple(skipped), tuple(failed))

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
        alignments: Sequence[ChainMsas] = [([], []) for _ in target.chains]
        if self.msa_dir is not None:
            alignments = load_alignments(self.msa_dir, target)
        settings = self.config.recorded()
        record = run_record(target, alignments, networks, settings, device=str(self.device))
        if CompletionMarker.is_complete(self.output, target.name, record["input_hash"]):
            self.progress.skip(cost)
            say(f"{label}: finished before with the same input and settings, skipped")
            return False
        self._announce(target, label, alignments, networks)

        def watch(model: AlphaFold) -> AbstractContextManager[OnCycle]:
            recycles = self.config.recycles(model.config)
            return self.progress.passes(f"{label} {model.name}", recycles, cost / len(networks))

        predictions = predict_target(
            target,
            [network.load(self.config.precision) for network in networks],
            alignments,
            self.config,
            device=self.device,
            watch=watch,
            say=say,
            run=None if self.distributed is None else self.distributed.run,
        )
        count = write_target(self.output, target.name, record, predictions, plots=self.config.plots)
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

    def _announce(
        self, target: Target, label: str, alignments: Sequence[ChainMsas], networks: Sequence[Network]
    ) -> None:
        """Say what a target is folded from, and by which networks."""
        say = self.progress.line
        rows = [sum(len(msa.sequences) for group in pair for msa in group) for pair in alignments]
        for chain, count in zip(target.chains, rows, strict=True):
            if self.msa_dir is not None and not count:
                what = f"chain {chain.id}" if target.is_complex else repr(target.record)
                say(
                    f"warning: {target.name}: no alignment of {what} in {self.msa_dir}; its sequence alone is used"
                )
        evidence = f"{sum(rows):,} alignment rows" if any(rows) else "no alignment, from the sequence alone"
        if self.config.pae is None and not keeps_pae(target.num_residues, None):
            say(
                f"{label}: aligned errors of all pairs are left out of so long a target; --pae yes writes them"
            )
        names = ", ".join(network.name for network in networks)
        say(f"{label}: {target.num_residues:,} residues, {evidence}, by {names}")


def _cost(target: Target, networks: Sequence[Network], config: InferConfig) -> float:
    """Work of a target in arbitrary units: cubic in its length, and short targets take their time too."""
    n = target.num_residues
    passes = sum(config.recycles(network.info.config) + 1 for network in networks)
    return passes * float(n + 50) ** 2 * (n + 500)
