"""Pull of CA atoms towards a superposed template in the descent on the distogram.

An atom within the threshold of its place in the template is free. The template is superposed in each step, and its
motion counts as fixed in the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastfold.protein.metrics.tm_score import superpose

TEMPLATE_FEATURES = ("forced_residues", "forced_positions", "forced_thresholds", "forced_numbers")
"""Optional features of a network with a descent.

Places of M residues ``[M]``, positions of their CA atoms in a template ``[M, 3]`` and the largest deviations ``[M]`` in
Å, and numbers of the templates from 0 on ``[M]``.
"""
_STIFFNESS = 2000.0  #: Per Å²
_LONGEST = 4.0  #: Excess in Å from which the pull stays the same
_MARGIN = 0.5  #: Largest distance in Å within the threshold from which an atom is free
_SHORTEST = 1e-6


@dataclass(frozen=True)
class TemplatePull:
    """Pull of M atoms of one structure to their places in a template."""

    points: Tensor  #: Numbers of the atoms among the points of a descent ``[M]``, int64
    positions: Tensor  #: ``[M, 3]`` in Å
    free: Tensor  #: Deviation in Å up to which the pull is zero ``[M]``

    def moved(self, by: int) -> TemplatePull:
        """Return the pull of a structure whose points have other numbers."""
        return replace(self, points=self.points + by)

    def placed(self, atoms: Tensor) -> Tensor:
        """Return the template ``[M, 3]`` superposed on atoms ``[M, 3]``."""
        motion = superpose(self.positions, atoms, torch.ones_like(self.free))
        return motion[..., None].apply(self.positions).to(atoms)

    def total(self, points: Tensor) -> Tensor:
        """Return the energy of ``points [P, 3]`` in Å, a scalar."""
        _, _, excess = self._deviations(points)
        bounded = excess.clamp(max=_LONGEST)
        return (_STIFFNESS * bounded * (excess - bounded / 2)).sum()

    def add_forces(self, forces: Tensor, points: Tensor) -> None:
        """Add the gradient of :meth:`total` to ``forces [P, 3]``."""
        offset, deviation, excess = self._deviations(points)
        slope = _STIFFNESS * excess.clamp(max=_LONGEST) / deviation
        forces.index_add_(0, self.points, slope[:, None] * offset)

    def _deviations(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets ``[M, 3]`` from the template, their lengths, and how far these are above the free ones."""
        atoms = points[self.points]
        offset = atoms - self.placed(atoms)
        deviation = offset.norm(dim=-1).clamp(min=_SHORTEST)
        return offset, deviation, (deviation - self.free).relu()


def template_pulls(
    features: Mapping[str, Tensor], sample: tuple[int, ...], *, per_residue: int, ca: int
) -> tuple[TemplatePull, ...]:
    """Return the pulls of one sample of :data:`TEMPLATE_FEATURES`, one a template; none without these features.

    A residue has ``per_residue`` points in the descent; its CA is number ``ca``.
    """
    if TEMPLATE_FEATURES[0] not in features:
        return ()
    residues, positions, thresholds, numbers = (features[name][sample] for name in TEMPLATE_FEATURES)
    free = thresholds - (thresholds / 2).clamp(max=_MARGIN)
    of_template = [numbers == number for number in range(int(numbers.max()) + 1)]
    return tuple(
        TemplatePull(per_residue * residues[own].long() + ca, positions[own], free[own])
        for own in of_template
    )
