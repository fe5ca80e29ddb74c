"""Folds of designs from their sequences, as of any other target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.models import Network, suitable
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.runner import Summary
from fastfold.inference.target_templates import takes_templates
from fastfold.products.design.results.design import Design
from fastfold.products.design.tasks.task import DesignTask


def fold_designs(
    designs: Sequence[Design],
    path: Path,
    networks: Sequence[Network],
    config: InferConfig,
    *,
    output: Path,
    overwrite: bool,
    run: Callable[[InferRequest], Summary],
) -> list[tuple[str, str]]:
    """Fold designs from a FASTA file into a folder; return name and reason of each fold that failed.

    Given chains have their templates if a network takes any, designed ones their sequence alone. ``run`` folds the
    targets of a request by the networks.
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

    def read(rings: bool | str) -> tuple[list[Target], list[InputError]]:
        targets, errors = read_targets([path])
        chosen = [target for target in targets if tasks[target.record].rings == rings]
        return [prepared(target, tasks[target.record]) for target in chosen], errors

    failed: list[tuple[str, str]] = []
    for rings in dict.fromkeys(task.rings for task in tasks.values()):
        kept = {"rings": rings} if isinstance(rings, str) else {"cyclic": rings}
        settings = replace(config, **kept)
        options = RunOptions(overwrite=overwrite)
        weights = [network.path for network in networks]
        summary = run(InferRequest(partial(read, rings), output, weights, settings, options))
        failed += summary.failed
    return failed
