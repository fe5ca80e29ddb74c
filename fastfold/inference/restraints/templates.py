"""Templates that a prediction keeps to: restraints between their CA atoms, and deviations of the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fastfold.data.targets import Chain, Target
from fastfold.data.templates.features import ForcedTemplate
from fastfold.inference.restraints.restraint import Restraint
from fastfold.protein.metrics.tm_score import superpose
from fastfold.protein.residue_constants import atom_order

_WEIGHT = 0.1
"""Weight of a restraint of a template; a residue has many of them."""


def template_restraints(target: Target) -> list[Restraint]:
    """Return restraints that keep distances of CA atoms within the thresholds of the target's forced templates.

    The pairs are 1, 2, 4, 8 and so on residues of the template apart, which fixes its shape with few pairs.
    """
    restraints: list[Restraint] = []
    for start, _, one, places in forced_residues(target):
        for step in 2 ** np.arange(len(places).bit_length()):
            for first, second in zip(places[:-step], places[step:], strict=True):
                distance = float(np.linalg.norm(one.positions[first] - one.positions[second]))
                low, high = max(distance - one.threshold, 0.0), distance + one.threshold
                ends = int(start + first), int(start + second)
                restraints.append(Restraint(*ends, low, high, weight=_WEIGHT, line=one.name))
    return restraints


def forced_template_report(target: Target, positions: np.ndarray) -> list[dict[str, Any]]:
    """Return the deviations in Å of a prediction's CA atoms from each forced template, superposed on it.

    ``positions [N, 37, 3]`` are in Å and in the order of the target's residues.
    """
    report = []
    for start, chain, one, places in forced_residues(target):
        predicted = torch.from_numpy(positions[start + places, atom_order["CA"]]).double()
        template = torch.from_numpy(one.positions[places]).double()
        motion = superpose(predicted, template, torch.ones(len(places), dtype=torch.float64))
        deviations = (motion[..., None].apply(predicted) - template).norm(dim=-1)
        report.append(
            {
                "chain": chain.id,
                "name": one.name,
                "threshold": one.threshold,
                "residues": len(places),
                "within": int((deviations <= one.threshold).sum()),
                "rmsd": round(float(deviations.square().mean().sqrt()), 3),
                "largest_deviation": round(float(deviations.max()), 3),
            }
        )
    return report


def forced_residues(target: Target) -> Iterator[tuple[int, Chain, ForcedTemplate, np.ndarray]]:
    """Yield the first residue, the chain, and the residues with an atom of each forced template."""
    start = 0
    for chain, templates in zip(target.chains, target.forced_templates, strict=False):
        known = np.array([letter != "X" for letter in chain.sequence])
        for one in templates:
            if len(places := np.flatnonzero(one.mask & known)) > 1:
                yield start, chain, one, places
        start += len(chain.sequence)
