"""Fold designs again, as any other targets; given chains have their templates, designed ones their sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.design.results.table import Design
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.runner import Summary
from fastfold.inference.runner import run as run_infer


def fold_designs(
    designs: Sequence[Design],
    path: Path,
    networks: Sequence[Path],
    config: InferConfig,
    *,
    overwrite: bool,
) -> Summary:
    """Fold designs from a FASTA file into its folder.

    Args:
        designs: The designs.
        path: File of their records.
        networks: Networks that fold.
        config: Settings of the folds.
        overwrite: True to fold everything again.

    Raises:
        WriteError: A result cannot be written.
    """
    tasks = {name: task for design in designs for name, task in design.complexes.items()}

    def read() -> tuple[list[Target], list[InputError]]:
        targets, errors = read_targets([path])
        return [
            replace(target, templates=tasks[target.record].template_features) for target in targets
        ], errors

    return run_infer(InferRequest(read, path.parent, networks, config, RunOptions(overwrite=overwrite)))
