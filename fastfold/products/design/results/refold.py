"""Folds of designs from their sequences, as of any other target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.models import Network, suitable
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.report.discover import FoundPrediction, find_predictions
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.runner import Summary
from fastfold.inference.target_templates import takes_templates
from fastfold.products.design.results.design import Design
from fastfold.products.design.tasks.task import DesignTask


class FoldedDesigns(NamedTuple):
    """Predictions of designs with the settings of a run, and name and reason of each fold that failed."""

    predictions: list[FoundPrediction]
    failed: list[tuple[str, str]]


def fold_designs(
    designs: Sequence[Design],
    path: Path,
    networks: Sequence[Network],
    config: InferConfig,
    *,
    output: Path,
    overwrite: bool,
    run: Callable[[InferRequest], Summary],
) -> FoldedDesigns:
    """Fold designs from a FASTA file into a folder.

    Given chains have their templates if a network takes any, designed ones their sequence alone. ``run`` folds the
    targets of a request by the networks. Folds of other sequences under the designs' names are removed with
    ``overwrite``, and raise ConfigError without it.
    """
    tasks = {name: task for design in designs for name, task in design.complexes.items()}

    def prepared(target: Target, task: DesignTask) -> Target:
        # An empty alignment, because none is missing. Chains have the sequences of the design, and the task's names.
        chains = tuple(
            replace(own, sequence=one.sequence, letters=one.letters)
            for own, one in zip(task.target.chains, target.chains, strict=True)
        )
        target = replace(target, chains=chains, alignments=tuple(([], []) for _ in chains))
        folding = suitable(networks, target)
        joined = target.is_complex and not folding[0].info.multimer
        task = replace(task, own_flexible="free")
        features = task.joined_template_features if joined else task.template_features
        takers = [one for one in folding if takes_templates(one.info.config, target, are_whole=joined)]
        return replace(target, templates=features) if takers else target

    def with_rings(rings: bool | str) -> tuple[list[Target], list[InputError]]:
        return [target for target in targets if tasks[target.record].rings == rings], errors

    read, errors = read_targets([path])
    targets = [prepared(target, tasks[target.record]) for target in read]
    folder = ResultsFolder(output)
    _take_names(folder, targets, overwrite=overwrite)
    failed: list[tuple[str, str]] = []
    made: set[str] = set()
    for rings in dict.fromkeys(task.rings for task in tasks.values()):
        kept = {"rings": rings} if isinstance(rings, str) else {"cyclic": rings}
        settings = replace(config, **kept)
        options = RunOptions(overwrite=overwrite)
        weights = [network.path for network in networks]
        summary = run(InferRequest(partial(with_rings, rings), output, weights, settings, options))
        failed += summary.failed
        for target in with_rings(rings)[0]:
            if wanted := summary.predictions.get(target.name):
                results = folder.target(target)
                made |= {results.name(record, "") for record in results.records() if record.id in wanted}
    return FoldedDesigns([one for one in find_predictions(output) if one.stem in made], failed)


def _take_names(folder: ResultsFolder, targets: Sequence[Target], *, overwrite: bool) -> None:
    """Remove folds of other sequences under the names of targets, or raise ConfigError without ``overwrite``."""
    for target in targets:
        if (others := folder.other_results(target)) is None:
            continue
        if not overwrite:
            raise ConfigError(
                f"{folder.path} has folds of another sequence named {target.name}; choose another `out`, or "
                "`overwrite` to remove them"
            )
        others.release()
