"""Distance restraints between residues, and groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Atoms = Literal["CA", "CB", "any"]
"""Atoms of a restraint: CA, CB (CA of glycine), or the closest heavy atoms of both residues."""

ATOMS: tuple[Atoms, ...] = get_args(Atoms)


@dataclass(frozen=True)
class Restraint:
    """Distance of two residues, whose places in the target are counted from 0.

    Bounds are in Å, ``high`` is infinite for none. One restraint of a group must hold. ``line`` is its place in the
    file, ``atoms`` are those that the distance is between.

    Example:
        >>> from fastfold.inference.restraints import Restraint
        >>> Restraint(first=11, second=47, low=0.0, high=8.0).weight
        1.0
    """

    first: int
    second: int
    low: float
    high: float
    weight: float = 1.0
    group: str = ""
    line: str = ""
    atoms: Atoms = "CA"


def grouped(restraints: Sequence[Restraint]) -> list[list[int]]:
    """Return the numbers of restraints by group, in which one must hold; others are alone."""
    groups: dict[Any, list[int]] = {}
    for number, one in enumerate(restraints):
        groups.setdefault(one.group or number, []).append(number)
    return list(groups.values())


def holding(restraints: Sequence[Restraint], distances: np.ndarray) -> list[bool]:
    """Return whether each restraint holds at distances ``[R]`` in Å of its atoms."""
    return [
        bool(one.low <= distance <= one.high) for one, distance in zip(restraints, distances, strict=True)
    ]


def satisfied(restraints: Sequence[Restraint], distances: np.ndarray) -> int:
    """Return the number of groups in which a restraint holds at distances ``[R]`` in Å."""
    holds = holding(restraints, distances)
    return sum(any(holds[i] for i in group) for group in grouped(restraints))
