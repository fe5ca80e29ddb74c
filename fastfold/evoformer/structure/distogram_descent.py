"""Descent on the distogram: residues move until distances agree with their predicted distributions.

A small structure module uses less than the distogram knows. Residues move as rigid bodies down a potential of the
predicted CB distances (Senior et al., Nature 577, 2020) under sterics, and keep the geometry of neighbours in the
chain. They start from the structure module's fold, and from two mirror images of a fold that the distogram alone
gives. The start that ends in the lowest energy is taken, where strands that twist as in proteins count as energy, since
distances do not tell mirror images apart. Then residues move to high expected scores, and at last they get the backbone
of a protein (:mod:`fastfold.evoformer.structure.backbone_descent`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.execution import LazyRows
from fastfold.evoformer.structure.backbone_descent import build_backbone
from fastfold.evoformer.structure.distogram_embedding import (
    embedding_bytes,
    mirror_images,
    start_at_templates,
)
from fastfold.evoformer.structure.distogram_potential import (
    Distances,
    Overlaps,
    PointPairs,
    Springs,
    potential_bytes,
    strand_twist,
)
from fastfold.evoformer.structure.restraint_springs import RestraintSprings
from fastfold.evoformer.structure.rigid_points import arms, placed, rotations, torques
from fastfold.kernels.cpu.block_threads import on_one_core
from fastfold.protein import residue_constants as rc
from fastfold.protein.rigid import update_quaternion

_PEPTIDE = (("CA", "CA", 3.80), ("C", "N", 1.33), ("CA", "N", 2.43), ("C", "CA", 2.43))
"""Distances in Å between an atom of a residue and one of the next in a trans peptide; they fix its angles too."""
_POINTS = {"N": 0, "CA": 1, "C": 2, "CB": 3}
_POINTS_WITH_HAND = 3  #: Residues up to which a fold equals its mirror image
_STARTS = 3  #: Number of starts: the structure module's fold, and two mirror images
_TOGETHER = 256
"""Residues up to which all starts descend together; those of longer chains would need more memory."""
_PAIRS_OF_CORE = 100_000
"""Pairs of all structures that descend together up to which operators on a CPU are quickest on one core."""
_TURN = 0.2
"""Rate of rotations over that of moves, in 1/Å²: atoms are about 1.5 Å from the origin of their frame."""


def descend(
    affines: Tensor,
    logits: Tensor | LazyRows,
    bin_edges: Tensor,
    *,
    aatype: Tensor,
    residue_index: Tensor,
    seq_mask: Tensor,
    predicted: Tensor,
    config: ConfigDict,
    first_row: int = 0,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
    restraints: RestraintSprings | None = None,
) -> Tensor:
    """Move residue frames down the potential of their distances, without recording gradients.

    The potential of a pair is the negative logarithm of its distribution over the mean distribution of all pairs of
    the target at the same separation in the chain.

    Args:
        affines: Quaternions and CA positions in Å, ``[N, 7]`` float32.
        logits: Of the distogram, rows ``[n, N, bins]`` from ``first_row`` on; all rows without ranks.
        bin_edges: ``[bins - 1]`` in Å, evenly spaced.
        aatype: ``[N]``.
        residue_index: ``[N]``; neighbours in a chain differ by 1.
        seq_mask: ``[N]``, 0 for padding, which does not move.
        predicted: Phi and psi of the network ``[N, 2]`` in radians.
        config: Config node ``descent`` with ``steps``, ``rate`` in Å per unit of the gradient, ``momentum``,
            ``largest_force`` in 1/Å, ``overlap`` (weight per Å²), ``overlap_distance`` in Å, ``bond`` and ``local``
            (weights per Å²), ``local_start``, the factor of ``local`` in the first step, ``window``, the residues along
            the chain whose distances are kept, and ``last_steps`` with ``lddt`` and ``agreement``, the weights of
            expected scores in them, ``share``, the factor of the potential, and ``stiffness``, that of ``overlap`` and
            ``bond``; ``twist``, the energy of
            :func:`fastfold.evoformer.structure.distogram_potential.strand_twist` in the choice of the start; and
            ``backbone_steps``, those of the backbone, 0 to leave it as it is.
        first_row: Number of the first row of ``logits``.
        sum_over_ranks: Sums a tensor over the processes that hold other rows.
        restraints: Springs between restrained residues; None for none.

    Returns:
        The moved frames ``[N, 7]``; the given ones if they are not finite.
    """
    if not bool(affines.isfinite().all()):
        return affines  # no start for a descent; callers report positions that are not finite
    with torch.no_grad():
        present = seq_mask > 0
        rows: dict[str, Any] = {"first_row": first_row, "sum_over_ranks": sum_over_ranks}
        starts = [affines]
        if int(present.sum()) > _POINTS_WITH_HAND:
            starts += mirror_images(
                affines,
                logits,
                bin_edges,
                residue_index=residue_index,
                present=present,
                restraints=restraints,
                **rows,
            )
        if restraints is not None and restraints.templates:
            starts = [start_at_templates(one, restraints) for one in starts]
        distances = Distances.from_logits(logits, bin_edges, residue_index, present, **rows)
        fall = _Fall(
            affines,
            distances,
            aatype,
            residue_index,
            present,
            config,
            sum_over_ranks,
            restraints=restraints,
        )
        together = len(starts) if len(affines) <= _TOGETHER else 1

        def energy(end: Tensor) -> float:
            twist = strand_twist(end[present, 4:], residue_index[present])
            return float(fall.energy(end) - config.twist * twist)

        def settle() -> Tensor:
            group = fall.repeated(together)
            ends: list[Tensor] = []
            for begin in range(0, len(starts), together):
                some = torch.cat(starts[begin : begin + together])
                ends += group.descend(some, config.steps, config.local_start).chunk(together)
            best = min(ends, key=energy)
            distances.add_expected_scores(config.share, config.lddt, config.agreement)
            end = fall.stiffer(config.stiffness).descend(best, config.last_steps, 1.0)
            if not config.backbone_steps:
                return end
            return build_backbone(
                end,
                distances,
                aatype=aatype,
                residue_index=residue_index,
                present=present,
                predicted=predicted,
                steps=config.backbone_steps,
                sum_over_ranks=sum_over_ranks,
                restraints=restraints,
            )

        is_small = together * len(distances.separation) <= _PAIRS_OF_CORE
        return on_one_core(settle) if is_small and affines.device.type == "cpu" else settle()


def descent_bytes(rows: int, residues: int, bins: int) -> int:
    """Return the bytes that :func:`descend` takes for ``rows`` of the pair of ``residues``, without logits."""
    copies = _STARTS if residues <= _TOGETHER else 1
    return max(potential_bytes(rows, residues, bins, copies=copies), embedding_bytes(residues))


class _Fall:
    """Rigid residues under forces between their atoms."""

    def __init__(
        self,
        affines: Tensor,
        distances: Distances,
        aatype: Tensor,
        residue_index: Tensor,
        present: Tensor,
        config: ConfigDict,
        sum_over_ranks: Callable[[Tensor], Tensor],
        *,
        restraints: RestraintSprings | None = None,
    ) -> None:
        self._restraints = restraints
        center = affines[:, 4:]
        self._config, self._distances, self._sum_over_ranks = config, distances, sum_over_ranks
        self._overlap = config.overlap
        self._overlaps = Overlaps(distances.blocks, config.overlap_distance, len(affines))
        self._shape = _rigid_points(aatype, center)
        points = placed(affines, self._shape)
        self._bonds = _peptide_springs(residue_index, present, center, config.bond)
        self._local = _local_springs(points, residue_index, present, config.local, config.window)

    def repeated(self, copies: int) -> _Fall:
        """Return the fall of ``copies`` structures with the same potential, whose frames follow one another."""
        if copies == 1:
            return self
        other = copy.copy(self)
        other._shape = self._shape.repeat(copies, 1, 1)
        other._distances = self._distances.repeated(copies)
        other._overlaps = Overlaps(other._distances.blocks, self._config.overlap_distance, len(other._shape))
        other._bonds, other._local = self._bonds.repeated(copies), self._local.repeated(copies)
        if self._restraints is not None:
            other._restraints = self._restraints.repeated(copies)
        return other

    def stiffer(self, factor: float) -> _Fall:
        """Return the fall with stronger sterics and peptide bonds."""
        other = copy.copy(self)
        other._overlap = factor * self._overlap
        other._bonds = replace(self._bonds, weight=factor * self._bonds.weight)
        return other

    def energy(self, affines: Tensor) -> Tensor:
        """Return the energy of frames ``[N, 7]``, a scalar that is equal on all processes."""
        config, center = self._config, affines[:, 4:]
        points = placed(affines, self._shape)
        own = self._distances.total(points[:, _POINTS["CB"]])
        own += self._distances.overlap(center, config.overlap_distance, self._overlap)
        flat = points.flatten(0, 1)
        total = self._sum_over_ranks(own) + self._bonds.total(flat) + self._local.total(flat)
        return total if self._restraints is None else total + self._restraints.total(flat)

    def descend(self, affines: Tensor, steps: int, local_start: float) -> Tensor:
        """Move frames ``[N, 7]`` down the energy, with local springs that weaken from ``local_start`` to 1."""
        config = self._config
        quaternion, center = affines[:, :4], affines[:, 4:]
        turning, moving = torch.zeros_like(center), torch.zeros_like(center)
        for step in range(steps):
            done = step / steps
            rate = config.rate * (0.02 + 0.5 * (1 + math.cos(math.pi * done)))
            rotation = rotations(quaternion)
            arm = arms(rotation, self._shape)
            gradient = self._forces(arm + center[:, None], local_start + (1 - local_start) * done)
            torque = torques(rotation, arm, gradient)
            moving = config.momentum * moving + _limited(gradient.sum(1), config.largest_force)
            turning = config.momentum * turning + _limited(torque, config.largest_force)
            center = center - rate * moving
            quaternion = update_quaternion(quaternion, -_TURN * rate * turning)
        return torch.cat([quaternion, center], -1)

    def _forces(self, points: Tensor, local: float) -> Tensor:
        """Return the gradient ``[N, 4, 3]`` of the energy, with ``local`` times the local springs."""
        distances = self._distances
        gradient = torch.zeros_like(points)
        gradient[:, _POINTS["CB"]] = distances.forces(points[:, _POINTS["CB"]])
        gradient[:, _POINTS["CA"]] = self._overlaps.forces(points[:, _POINTS["CA"]], self._overlap)
        gradient = self._sum_over_ranks(gradient)
        flat = points.flatten(0, 1)
        of_chain = self._bonds.forces(flat) + local * self._local.forces(flat)
        if self._restraints is not None:
            of_chain += self._restraints.forces(flat)
        return gradient + of_chain.view_as(points)


def _rigid_points(aatype: Tensor, like: Tensor) -> Tensor:
    """Return N, CA, C and CB of each residue in its frame, ``[N, 4, 3]`` in Å; glycine's CB is its CA."""
    alanine = rc.restype_atom14_rigid_group_positions[rc.restype_order["A"]][[0, 1, 2, 4]]
    points = torch.as_tensor(alanine).to(like).repeat(len(aatype), 1, 1)
    points[aatype == rc.restype_order["G"], _POINTS["CB"]] = 0.0
    return points


def _peptide_springs(residue_index: Tensor, present: Tensor, like: Tensor, weight: float) -> Springs:
    """Return springs that hold peptide bonds: their length, angles and trans form."""
    bonded = (residue_index[1:] - residue_index[:-1] == 1) & present[1:] & present[:-1]
    before = bonded.nonzero()[:, 0]
    ends = [(before * 4 + _POINTS[a], (before + 1) * 4 + _POINTS[b]) for a, b, _ in _PEPTIDE]
    length = torch.cat([like.new_full((len(before),), distance) for *_, distance in _PEPTIDE])
    first, second = (torch.cat(each) for each in zip(*ends, strict=True))
    pairs = PointPairs(first, second, 4 * len(residue_index))
    return Springs(pairs, length, torch.full_like(length, weight))


def _local_springs(
    points: Tensor, residue_index: Tensor, present: Tensor, weight: float, window: int
) -> Springs:
    """Return springs that keep the pose of residues near in the chain, weaker by the square of their separation."""
    ends = []
    for apart in range(1, window + 1):
        near = (residue_index[apart:] - residue_index[:-apart]).abs() <= window
        ends.append((near & present[apart:] & present[:-apart]).nonzero()[:, 0])
    first = torch.cat(ends)
    second = torch.cat([each + apart for apart, each in enumerate(ends, 1)])
    separation = (residue_index[second] - residue_index[first]).abs()
    atoms = torch.arange(4, device=points.device)
    first = (first[:, None, None] * 4 + atoms[:, None]).expand(-1, 4, 4).flatten()
    second = (second[:, None, None] * 4 + atoms).expand(-1, 4, 4).flatten()
    weights = (weight / 16 / separation.square().clamp(min=1)).repeat_interleave(16).to(points)
    flat = points.flatten(0, 1)
    pairs = PointPairs(first, second, len(flat))
    return Springs(pairs, pairs.offsets(flat)[1], weights)


def _limited(gradient: Tensor, largest: float) -> Tensor:
    """Scale vectors ``[N, 3]`` to lengths below ``largest``, smoothly."""
    return gradient / (1 + torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) / largest)
