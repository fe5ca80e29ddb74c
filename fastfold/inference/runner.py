"""``fastfold infer``: fold every target of some FASTA files and write what was found."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastfold._version import __version__
from fastfold.data.alignment import Msa
from fastfold.data.fasta import read_targets
from fastfold.data.features import featurize
from fastfold.data.msa_folder import load_alignments
from fastfold.data.targets import Target, safe_stem
from fastfold.errors import ConfigError, FastFoldError
from fastfold.evoformer.checkpoint import WeightsInfo, load_model, weights_info
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.files import (
    CompletionMarker,
    file_digest,
    input_hash,
    prepare_output_directory,
    write_atomic,
)
from fastfold.inference.folding import Precision, choose_device, fold, set_precision
from fastfold.inference.memory_estimate import check_fits
from fastfold.inference.prediction import Prediction
from fastfold.inference.progress import Progress
from fastfold.inference.scores import lines_json

Alignments = list[tuple[list[Msa], list[Msa]]]


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run, besides the inputs and the weights.

    Attributes:
        num_recycles: Extra passes; None for each network's own number.
        seed: Seed of everything random.
        precision: ``fp32`` or ``bf16``.
        plots: Whether pictures are drawn.
    """

    num_recycles: int | None = None
    seed: int = 0
    precision: Precision = "fp32"
    plots: bool = True


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


class Network:
    """A weights file and, once it is needed, the network in it.

    Args:
        path: Weights file.
        name: Name of the network in file names.

    Raises:
        WeightsError: The file cannot be used.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.info: WeightsInfo = weights_info(path)
        self.digest = file_digest(path)
        self._model: AlphaFold | None = None

    def load(self, device: torch.device, precision: Precision) -> AlphaFold:
        """The network on ``device``."""
        if self._model is None:
            self._model = set_precision(load_model(self.path), precision)
        return self._model.to(device)

    def rest(self) -> None:
        """Leave the accelerator's memory to the others."""
        if self._model is not None:
            self._model.to("cpu")


def run(
    inputs: Sequence[Path],
    output: Path,
    weights: Sequence[Path],
    *,
    msa_dir: Path | None = None,
    complex_: bool = False,
    device: str = "auto",
    settings: Settings | None = None,
) -> Summary:
    """Fold all targets, each by every network that suits it, best prediction first.

    A target whose files are there from an earlier run with the same inputs, settings and weights is skipped; one
    that fails is reported and the others go on.

    Args:
        inputs: FASTA files.
        output: Folder for the results.
        weights: Weights files.
        msa_dir: Folder of alignments; None to fold from the sequences alone.
        complex_: Each file is one complex.
        device: ``auto``, ``cpu`` or ``cuda``.
        settings: See :class:`Settings`.

    Raises:
        FastFoldError: Nothing can be folded at all: unusable weights, output folder, or device.
    """
    settings = settings or Settings()
    where = choose_device(device)
    networks = [Network(path, name) for path, name in zip(weights, _network_names(weights), strict=True)]
    output = prepare_output_directory(output)
    targets, errors = read_targets(inputs, complex_=complex_)
    failed: list[tuple[str, str]] = [("", str(error)) for error in errors]
    folded: list[str] = []
    skipped: list[str] = []
    costs = [_cost(target, _suitable(networks, target), settings) for target in targets]
    with Progress(sum(costs)) as progress:
        for error in errors:
            progress.line(f"error: {error}")
        for number, (target, cost) in enumerate(zip(targets, costs, strict=True), 1):
            label = f"{target.name} ({number}/{len(targets)}, {target.num_residues} residues)"
            try:
                done = _fold_target(target, label, cost, networks, output, msa_dir, where, settings, progress)
            except (FastFoldError, MemoryError, torch.OutOfMemoryError) as error:
                reason = _reason(error, target)
                failed.append((target.name, reason))
                progress.skip(cost)
                progress.line(f"error: {reason}")
                continue
            (folded if done else skipped).append(target.name)
    return Summary(tuple(folded), tuple(skipped), tuple(failed))


def _fold_target(
    target: Target,
    label: str,
    cost: float,
    networks: Sequence[Network],
    output: Path,
    msa_dir: Path | None,
    device: torch.device,
    settings: Settings,
    progress: Progress,
) -> bool:
    """Fold and write one target; False if it was finished before."""
    for warning in target.warnings:
        progress.line(f"warning: {target.name}: {warning}")
    suitable = _suitable(networks, target)
    if not suitable:
        raise ConfigError(
            f"{target.name} is a complex of {len(target.chains)} chains, and the weights given are of monomer "
            "networks; add --weights of a multimer network (params_model_1_multimer_v3.npz and the like), or give "
            "its chains as separate FASTA records to fold them alone"
        )
    element_size = 2 if settings.precision == "bf16" else 4
    for network in suitable:
        check_fits(
            network.info.config, target.num_residues, device, element_size=element_size, name=target.name
        )
    alignments: Alignments = (
        load_alignments(msa_dir, target) if msa_dir else [([], []) for _ in target.chains]
    )
    record = _record(target, alignments, suitable, settings)
    if CompletionMarker.is_complete(output, target.name, record["input_hash"]):
        progress.skip(cost)
        progress.line(f"{label}: finished before with the same input and settings, skipped")
        return False
    rows = [len(msa.sequences) for unpaired, paired in alignments for msa in (*unpaired, *paired)]
    progress.line(f"{label}: " + (f"{sum(rows)} alignment rows" if rows else "no alignment, sequence alone"))
    predictions = [
        _predict(target, label, alignments, network, device, settings, cost / len(suitable), progress)
        for network in suitable
    ]
    predictions.sort(key=lambda p: p.ranking_confidence, reverse=True)
    files = [write_config(output, target.name, record)]
    for rank, prediction in enumerate(predictions, 1):
        files += prediction.save(output, rank=rank, plots=settings.plots).values()
    CompletionMarker.mark_complete(output, target.name, record["input_hash"], files)
    best = predictions[0]
    progress.line(
        f"{label}: pLDDT {best.mean_plddt:.1f} by {best.model_name}, {len(files)} files in {output}"
    )
    return True


def _predict(
    target: Target,
    label: str,
    alignments: Alignments,
    network: Network,
    device: torch.device,
    settings: Settings,
    cost: float,
    progress: Progress,
) -> Prediction:
    model = network.load(device, settings.precision)
    sampler = featurize(target.chains, alignments, model.config, seed=settings.seed)
    recycles = _recycles(network, settings)
    spent = 0.0

    def on_cycle(cycle: int, found: dict[str, Any]) -> None:
        nonlocal spent
        spent += cost / (recycles + 1)
        progress.step(
            f"{label} {network.name} recycle {cycle}/{recycles} pLDDT {found['mean_plddt']:.1f}",
            cost / (recycles + 1),
        )

    try:
        prediction = fold(
            model,
            sampler,
            target.chains,
            name=target.name,
            model_name=network.name,
            seed=settings.seed,
            num_recycles=recycles,
            on_cycle=on_cycle,
        )
    finally:
        network.rest()
    progress.skip(cost - spent)
    return prediction


def write_config(output: Path, name: str, record: dict[str, Any]) -> Path:
    """Write ``<name>_config.json`` with the settings, versions and input hash of a target."""
    path = output / f"{name}_config.json"
    write_atomic(path, lines_json(record))
    return path


def _record(
    target: Target, alignments: Alignments, networks: Sequence[Network], settings: Settings
) -> dict[str, Any]:
    """Settings, versions and the hash of everything that the result depends on."""
    chains = {chain.id: chain.sequence for chain in target.chains}
    weights = [
        {"model": network.name, "file": network.path.name, "sha256": network.digest} for network in networks
    ]
    rows = [
        [[(m.sequences, m.deletions, m.descriptions) for m in group] for group in pair] for pair in alignments
    ]
    digest = input_hash(chains, rows, weights, asdict(settings), __version__)
    return {
        "schema_version": 1,
        "name": target.name,
        "source": Path(target.source).name,
        "record": target.record,
        "chains": chains,
        "alignment_rows": [[sum(len(m.sequences) for m in group) for group in pair] for pair in alignments],
        "weights": weights,
        "settings": asdict(settings),
        "versions": {
            "fastfold": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "input_hash": digest,
    }


def _network_names(weights: Sequence[Path]) -> list[str]:
    """Names for file names: the weights files' own, without ``params_`` and ending."""
    if not weights:
        raise ConfigError(
            "no weights: give at least one file with --weights (official params_model_*.npz, OpenFold .pt, or "
            "FastFold .safetensors)"
        )
    names = [safe_stem(Path(path).name.rsplit(".", 1)[0].removeprefix("params_")) for path in weights]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two weights files are both called {name!r}: rename one, results bear this name"
            )
    return names


def _suitable(networks: Sequence[Network], target: Target) -> list[Network]:
    """Multimer networks for a complex; for one chain the monomer networks, or multimer ones if there are no others."""
    multimer = [network for network in networks if network.info.multimer]
    monomer = [network for network in networks if not network.info.multimer]
    return multimer if target.is_complex else monomer or multimer


def _recycles(network: Network, settings: Settings) -> int:
    own = network.info.config.model.num_recycle
    return own if settings.num_recycles is None else settings.num_recycles


def _cost(target: Target, networks: Sequence[Network], settings: Settings) -> float:
    """Work of a target in arbitrary units: attention and triangles grow with the cube of its length."""
    n = target.num_residues
    return sum(_recycles(network, settings) + 1 for network in networks) * float(n) ** 2 * (n + 500)


def _reason(error: BaseException, target: Target) -> str:
    if isinstance(error, FastFoldError):
        text = str(error)
        return text if target.name in text else f"{target.name}: {text}"
    return (
        f"{target.name}: the memory was not enough for {target.num_residues} residues; use --precision bf16, close "
        "other programs, or take a device with more memory"
    )
