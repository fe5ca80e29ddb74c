"""Springs between restrained residues in the descent on the distogram.

A spring is slack while its distance is within the limits. Its pull is bounded, so that a few impossible restraints do
not decide a fold. Restraints of one group are alternatives: the one nearest to its limits pulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastfold.evoformer.confidence.restraint_evidence import LimitedPairs
from fastfold.evoformer.structure.distogram_potential import PointPairs
from fastfold.evoformer.structure.template_pull import TemplatePull, template_pulls

POINTS = 4  #: Points of a residue in the descent: N, CA, C and CB
_CA = 1
RESTRAINT_FEATURES = ("restraint_points", "restraint_limits", "restraint_weights", "restraint_groups")
"""Optional features of a network with a descent.

Numbers of two points ``[R, 2]`` (:data:`POINTS` times the residue's place, plus 1 for CA or 3 for CB), limits of their
distance ``[R, 2]`` in Å, weights ``[R]``, and numbers of groups from 0 on ``[R]``.
"""
_STIFFNESS = 500.0  #: Of a restraint with weight 1, per Å²
_LONGEST = 4.0  #: Excess in Å from which the pull stays the same
_MARGIN = 0.5  #: Distance in Å within the limits from which a spring is slack


@dataclass(frozen=True)
class RestraintSprings:
    """Springs of R restraints between points of a descent, and pulls towards templates."""

    pairs: PointPairs
    low: Tensor  #: ``[R]`` in Å
    high: Tensor  #: ``[R]`` in Å, infinite for none
    weight: Tensor  #: ``[R]`` per Å²
    group: Tensor  #: Number of the group ``[R]``, int64
    groups: int  #: Number of groups
    templates: tuple[TemplatePull, ...] = ()  #: Pulls towards forced templates, of all structures

    @classmethod
    def from_features(
        cls, features: Mapping[str, Tensor], sample: tuple[int, ...] = ()
    ) -> RestraintSprings | None:
        """Create the springs of one sample of :data:`RESTRAINT_FEATURES`, or return None without these features."""
        if RESTRAINT_FEATURES[0] not in features:
            return None
        points, limits, weights, groups = (features[name][sample] for name in RESTRAINT_FEATURES)
        low, high = limits.unbind(-1)
        first, second = points.long().unbind(-1)
        return cls(
            pairs=PointPairs(first, second, POINTS * features["aatype"].shape[-1]),
            low=low,
            high=high,
            weight=_STIFFNESS * weights,
            group=groups.long(),
            groups=int(groups.max()) + 1 if len(groups) else 0,
            templates=template_pulls(features, sample, per_residue=POINTS, ca=_CA),
        )

    def repeated(self, copies: int) -> RestraintSprings:
        """Return the same springs in each of ``copies`` structures, whose points are numbered one after the other."""
        start = self.groups * torch.arange(copies, device=self.group.device)[:, None]
        low, high, weight = (x.repeat(copies) for x in (self.low, self.high, self.weight))
        group = (start + self.group).flatten()
        return replace(
            self,
            pairs=self.pairs.repeated(copies),
            low=low,
            high=high,
            weight=weight,
            group=group,
            groups=copies * self.groups,
            templates=tuple(
                one.moved(copy * self.pairs.count) for copy in range(copies) for one in self.templates
            ),
        )

    def total(self, points: Tensor) -> Tensor:
        """Return the energy of ``points [P, 3]`` in Å, a scalar."""
        _, distance = self.pairs.offsets(points)
        springs = self._nearest(self._excess(distance).abs())[0].sum()
        return springs + sum(one.total(points) for one in self.templates)

    def forces(self, points: Tensor) -> Tensor:
        """Return the gradient ``[P, 3]`` of :meth:`total` with respect to ``points [P, 3]``."""
        offset, distance = self.pairs.offsets(points)
        excess = self._excess(distance)
        pulls = self._nearest(excess.abs())[1]
        slope = self.weight * excess.clamp(-_LONGEST, _LONGEST) * pulls
        forces = self.pairs.forces(slope / distance, offset) if self.groups else torch.zeros_like(points)
        for one in self.templates:
            one.add_forces(forces, points)
        return forces

    def shorten(self, distance: Tensor) -> None:
        """Lower the distances ``[N, N]`` in Å of restrained residues to their upper limits, in place.

        Alternatives stay, because the one that holds is unknown.
        """
        alone = torch.bincount(self.group, minlength=self.groups)[self.group] == 1
        first, second, _, high = (x[alone] for x in self.limited_pairs())
        for row, column in ((first, second), (second, first)):
            distance.view(-1).scatter_reduce_(0, row * len(distance) + column, high.to(distance), "amin")

    def limited_pairs(self) -> LimitedPairs:
        """Return the residues and their limits, as those of CB."""
        return LimitedPairs(self.pairs.first // POINTS, self.pairs.second // POINTS, self.low, self.high)

    def _excess(self, distance: Tensor) -> Tensor:
        """Return how far distances ``[R]`` are above or, negative, below those without a pull."""
        margin = ((self.high - self.low) / 2).clamp(max=_MARGIN)
        above = (distance - self.high + margin).relu()
        return above - (self.low + margin - distance).relu() * (self.low > 0)

    def _nearest(self, excess: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest energy of each group, and a mask ``[R]`` of the restraints that have it."""
        bounded = excess.clamp(max=_LONGEST)
        energy = self.weight * bounded * (excess - bounded / 2)
        lowest = energy.new_full((self.groups,), torch.inf)
        lowest = lowest.scatter_reduce(0, self.group, energy, "amin")
        return lowest, energy == lowest[self.group]
