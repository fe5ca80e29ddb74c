"""Restraints as springs in the descent of a network that ends in one, such as ``mini``.

A restrained fold takes hardly longer than another one, and gets the same backbone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler
from fastfold.data.targets import Target
from fastfold.evoformer.structure.restraint_springs import POINTS, RESTRAINT_FEATURES
from fastfold.evoformer.structure.template_pull import TEMPLATE_FEATURES
from fastfold.inference.folding.network import RunNetwork
from fastfold.inference.folding.prediction import TargetFold, input_order
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.restraints.distances import RestrainedAtoms, beta_limits, restraint_distances
from fastfold.inference.restraints.report import LeftOut, RestraintReport
from fastfold.inference.restraints.restraint import Restraint, grouped, satisfied
from fastfold.inference.restraints.templates import forced_residues

_CA, _CB = 1, 3  # of the points of a residue

Fold = Callable[[TargetFold, RunNetwork], Prediction]
"""Function that folds a target by a function such as :func:`fastfold.inference.folding.network.run_network`."""


def add_springs(sampler: FeatureSampler, restraints: Sequence[Restraint]) -> None:
    """Add the features of restraints, in the order of the target's chains, to those of the target.

    Raises:
        ValueError: A residue lacks the atoms, because its type is unknown.
    """
    order = input_order(sampler)
    aatype = sampler.static["aatype"].astype(np.int64)
    RestrainedAtoms(restraints, torch.from_numpy(aatype), torch.from_numpy(order))
    groups = np.empty(len(restraints), np.int64)
    for number, group in enumerate(grouped(restraints)):
        groups[group] = number
    points, limits = [], []
    for one in restraints:
        ends = [int(order[place]) for place in (one.first, one.second)]
        points.append([POINTS * end + (_CA if one.atoms == "CA" else _CB) for end in ends])
        limits.append(beta_limits(one, *(int(aatype[end]) for end in ends)))
    weights = [one.weight for one in restraints]
    arrays = (
        np.array(points, np.int64).reshape(-1, 2),
        np.array(limits, np.float32).reshape(-1, 2),
        np.array(weights, np.float32),
        groups,
    )
    sampler.static.update(zip(RESTRAINT_FEATURES, arrays, strict=True))


def add_forced_templates(sampler: FeatureSampler, target: Target) -> None:
    """Add the features of a target's forced templates, if it has any, to its others."""
    forced = list(forced_residues(target))
    if not forced:
        return
    order = input_order(sampler)
    arrays = (
        np.concatenate([order[start + places] for start, _, _, places in forced]),
        np.concatenate([one.positions[places] for _, _, one, places in forced]).astype(np.float32),
        np.concatenate([np.full(len(places), one.threshold, np.float32) for _, _, one, places in forced]),
        np.concatenate([np.full(len(places), number) for number, (*_, places) in enumerate(forced)]),
    )
    sampler.static.update(zip(TEMPLATE_FEATURES, arrays, strict=True))


def fold_with_springs(
    one: TargetFold, restraints: Sequence[Restraint], fold: Fold, run: RunNetwork, *, leave_one_out: bool
) -> tuple[Prediction, RestraintReport]:
    """Fold a target under restraints in the order of its chains.

    Args:
        one: The fold, whose features get the restraints.
        restraints: The restraints.
        fold: Folds a target.
        run: Runs the network.
        leave_one_out: True for one more fold without each group, if not all hold.

    Raises:
        ValueError: See :func:`add_springs`.
    """
    structures: list[dict[str, Any]] = []

    def watched(*arguments: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        result, arrays = run(*arguments, **options)
        structures.append(result["structure_module"])
        return result, arrays

    add_springs(one.sampler, restraints)
    add_forced_templates(one.sampler, one.target)
    prediction = fold(one, watched)
    order = torch.from_numpy(input_order(one.sampler))
    aatype = torch.from_numpy(one.sampler.static["aatype"].astype(np.int64))
    atoms, structure = RestrainedAtoms(restraints, aatype, order), structures[-1]
    before = atoms.closest(structure["sidechains"]["atom_pos"][-1].float().cpu())
    probabilities = structure.get("restraint_probabilities", torch.zeros(0, 2))
    after = restraint_distances(restraints, prediction.atom_positions, prediction.aatype)
    left_out = None
    if leave_one_out:
        groups = grouped(restraints)
        has_trials = len(groups) > 1 and satisfied(restraints, after) < len(groups)
        trials = groups if has_trials else []
        left_out = tuple(_without(group, after, one, restraints, fold, run) for group in trials)
    report = RestraintReport(
        tuple(restraints),
        before=before.numpy(),
        after=after,
        probabilities=probabilities.float().cpu().numpy(),
        plddt=prediction.mean_plddt,
        left_out=left_out,
    )
    return prediction, report


def _without(
    group: Sequence[int],
    after: np.ndarray,
    one: TargetFold,
    restraints: Sequence[Restraint],
    fold: Fold,
    run: RunNetwork,
) -> LeftOut:
    """Fold without a group; ``after`` are the distances with all restraints."""
    trial = copy.copy(one)
    trial.on_cycle, trial.recycles = None, []
    add_springs(trial.sampler, [one for number, one in enumerate(restraints) if number not in group])
    without = fold(trial, run)
    distances = restraint_distances(restraints, without.atom_positions, without.aatype)

    def holds(numbers: Sequence[int], distances: np.ndarray) -> bool:
        return satisfied([restraints[i] for i in numbers], distances[numbers]) > 0

    contradicted = [
        other
        for other in grouped(restraints)
        if other != group and holds(other, distances) and not holds(other, after)
    ]
    return LeftOut(tuple(group), tuple(i for other in contradicted for i in other), distances, 0.0)
