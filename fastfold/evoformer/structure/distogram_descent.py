"""Descent on the distogram: residues move until distances agree with their predicted distributions.

A small structure module uses less than the distogram knows. This descent starts from its structure. It moves residues
as rigid bodies, down a potential of the predicted CB distances (Senior et al., Nature 577, 2020) under sterics, and
keeps the geometry of neighbours in the chain. All forces act between two points, so the gradient is written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastfold.evoformer.confidence.scores import row_blocks
from fastfold.evoformer.execution import LazyRows
from fastfold.protein import residue_constants as rc
from fastfold.protein.rigid import quaternion_to_rotation, update_quaternion

_PEPTIDE = (("CA", "CA", 3.80), ("C", "N", 1.33), ("CA", "N", 2.43), ("C", "CA", 2.43))
"""Distances in Å between an atom of a residue and one of the next in a trans peptide; they fix its angles too."""
_POINTS = {"N": 0, "CA": 1, "C": 2, "CB": 3}
_CLASSES = 40
"""Separations in the chain above this share one reference distribution."""
_NEAREST = 3
"""Least separation in the chain of pairs with a potential and overlaps; peptide geometry holds nearer ones."""
_TURN = 0.2
"""Rate of rotations over that of moves, in 1/Å²: atoms are about 1.5 Å from the origin of their frame."""
_EPSILON = 1e-6
"""In Å²; keeps directions finite for two points at the same position."""
_PAIR = 4 * 8
"""Bytes of the numbers of a pair and its separation, with a copy while they are joined."""
_PAIR_STEP = 160
"""Bytes of a pair while its forces are computed."""
_BLOCK = 2**18
"""Pairs whose forces are computed at a time."""


@dataclass(frozen=True)
class _Distances:
    """Potential of CB distances of pairs ``first [P]`` and ``second [P]``: ``energy [P, bins]``, in nats."""

    first: Tensor
    second: Tensor
    energy: Tensor
    start: float
    width: float

    def overlaps(self, points: Tensor, distance: float, weight: float) -> Tensor:
        """Return the gradient ``[N, 3]`` of ``weight * max(distance - d, 0)²`` with respect to ``points [N, 3]``."""
        total = torch.zeros_like(points)
        for begin in range(0, len(self.first), _BLOCK):
            first, second = self.first[begin : begin + _BLOCK], self.second[begin : begin + _BLOCK]
            offset, found = _offsets(points, first, second)
            push = (-2 * weight * torch.relu(distance - found) / found)[:, None] * offset
            total.index_add_(0, first, push).index_add_(0, second, -push)
        return total

    def forces(self, points: Tensor) -> Tensor:
        """Return the gradient ``[N, 3]`` of the sum over pairs with respect to ``points [N, 3]`` in Å."""
        total = torch.zeros_like(points)
        last = self.energy.shape[-1] - 1
        for begin in range(0, len(self.first), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            first, second = self.first[part], self.second[part]
            offset, distance = _offsets(points, first, second)
            # Quadratic B-splines over the bins have a continuous slope; it is zero beyond the first and last bin.
            position = (distance - self.start) / self.width
            inside = (position > 0.5) & (position < last - 0.5)
            position = position.clamp(0.5, last - 0.501)
            middle = (position + 0.5).floor()
            rest = position - middle
            near = middle.long()[:, None] + torch.arange(-1, 2, device=points.device)
            energy = self.energy[part].gather(1, near)
            slope = energy[:, 0] * (rest - 0.5) - 2 * energy[:, 1] * rest + energy[:, 2] * (rest + 0.5)
            pull = (slope * inside / (self.width * distance))[:, None] * offset
            total.index_add_(0, first, pull).index_add_(0, second, -pull)
        return total


@dataclass(frozen=True)
class _Springs:
    """Springs between points ``first [S]`` and ``second [S]``, with lengths in Å and weights per Å²."""

    first: Tensor
    second: Tensor
    length: Tensor
    weight: Tensor

    def forces(self, points: Tensor) -> Tensor:
        """Return the gradient ``[P, 3]`` of ``weight * (distance - length)²`` with respect to ``points [P, 3]``."""
        offset, distance = _offsets(points, self.first, self.second)
        pull = (2 * self.weight * (distance - self.length) / distance)[:, None] * offset
        return torch.zeros_like(points).index_add_(0, self.first, pull).index_add_(0, self.second, -pull)


def descend(
    affines: Tensor,
    logits: Tensor | LazyRows,
    bin_edges: Tensor,
    *,
    aatype: Tensor,
    residue_index: Tensor,
    seq_mask: Tensor,
    config: Any,
    first_row: int = 0,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Move residue frames down the potential of their distances, without recording gradients.

    The potential of a pair is the negative logarithm of its distribution over the mean distribution of all pairs of
    the target at the same separation in the chain. Without this reference, a structure would grow: most pairs are far
    apart, and an uncertain pair would be pushed there too.

    Args:
        affines: Quaternions and CA positions in Å, ``[N, 7]`` float32.
        logits: Of the distogram, rows ``[n, N, bins]`` from ``first_row`` on; all rows without ranks.
        bin_edges: ``[bins - 1]`` in Å, evenly spaced.
        aatype: ``[N]``.
        residue_index: ``[N]``; neighbours in a chain differ by 1.
        seq_mask: ``[N]``, 0 for padding, which does not move.
        config: Config node ``descent`` with ``steps``, ``rate`` in Å per unit of the gradient, ``momentum``,
            ``largest_force`` in 1/Å, ``overlap`` (weight per Å²), ``overlap_distance`` in Å, ``bond`` and ``local``
            (weights per Å²), and ``window``, the residues along the chain whose distances are kept.
        first_row: Number of the first row of ``logits``.
        sum_over_ranks: Sums a tensor over the processes that hold other rows.

    Returns:
        The moved frames ``[N, 7]``.
    """
    with torch.no_grad():
        present = seq_mask > 0
        distances = _distances(logits, bin_edges, residue_index, present, first_row, sum_over_ranks)
        quaternion, centre = affines[:, :4], affines[:, 4:]
        shape = _rigid_points(aatype, centre)
        start = _placed(quaternion_to_rotation(quaternion), centre, shape)
        springs = _joined(
            _peptide_springs(residue_index, present, centre, config.bond),
            _local_springs(start, residue_index, present, config.local, config.window),
        )
        turning, moving = torch.zeros_like(centre), torch.zeros_like(centre)
        for step in range(config.steps):
            rate = config.rate * (0.02 + 0.5 * (1 + math.cos(math.pi * step / config.steps)))
            rotation = quaternion_to_rotation(quaternion)
            points = _placed(rotation, centre, shape)
            gradient = torch.zeros_like(points)
            gradient[:, _POINTS["CB"]] = distances.forces(points[:, _POINTS["CB"]])
            gradient[:, _POINTS["CA"]] = distances.overlaps(centre, config.overlap_distance, config.overlap)
            gradient = sum_over_ranks(gradient)
            gradient += springs.forces(points.flatten(0, 1)).view_as(points)
            torque = torch.linalg.cross(points - centre[:, None], gradient).sum(1)
            torque = (rotation.transpose(-1, -2) * torque[:, None]).sum(-1)  # in the frame of the residue
            moving = config.momentum * moving + _limited(gradient.sum(1), config.largest_force)
            turning = config.momentum * turning + _limited(torque, config.largest_force)
            centre = centre - rate * moving
            quaternion = update_quaternion(quaternion, -_TURN * rate * turning)
        return torch.cat([quaternion, centre], -1)


def descent_bytes(rows: int, residues: int, bins: int) -> int:
    """Return the bytes that :func:`descend` takes for ``rows`` of the pair of ``residues``, without logits."""
    pairs = rows * residues // 2
    return pairs * (4 * bins + _PAIR) + min(pairs, _BLOCK) * _PAIR_STEP


def _rigid_points(aatype: Tensor, like: Tensor) -> Tensor:
    """Return N, CA, C and CB of each residue in its frame, ``[N, 4, 3]`` in Å; glycine's CB is its CA."""
    alanine = rc.restype_atom14_rigid_group_positions[rc.restype_order["A"]][[0, 1, 2, 4]]
    points = torch.as_tensor(alanine).to(like).repeat(len(aatype), 1, 1)
    points[aatype == rc.restype_order["G"], _POINTS["CB"]] = 0.0
    return points


def _placed(rotation: Tensor, centre: Tensor, shape: Tensor) -> Tensor:
    return (rotation[:, None] * shape[:, :, None]).sum(-1) + centre[:, None]


def _distances(
    logits: Tensor | LazyRows,
    bin_edges: Tensor,
    residue_index: Tensor,
    present: Tensor,
    first_row: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> _Distances:
    """Return the pairs of this process, each once, with their potential."""
    device, bins = present.device, logits.shape[-1]
    own = torch.arange(first_row, first_row + logits.shape[-3], device=device)
    first, second, classes = [own[:0]], [own[:0]], [own[:0]]
    for rows in own.split(256):
        apart = (residue_index[rows, None] - residue_index[None]).abs()
        later = torch.arange(len(present), device=device) > rows[:, None]
        row, column = (later & (apart >= _NEAREST) & present[rows, None] & present).nonzero(as_tuple=True)
        first.append(rows[row])
        second.append(column)
        classes.append(apart[row, column].clamp(max=_CLASSES).long())
    row_numbers, column_numbers, separation = torch.cat(first), torch.cat(second), torch.cat(classes)
    del first, second, classes
    energy = torch.empty(len(row_numbers), bins, device=device)
    end = 0
    for rows, part in row_blocks(logits):
        begin, end = end, int((row_numbers < first_row + rows.stop).sum())
        chosen = row_numbers[begin:end] - first_row - rows.start, column_numbers[begin:end]
        energy[begin:end] = part[chosen].float().log_softmax(-1)
    totals = torch.zeros(_CLASSES + 1, bins + 1, device=device)
    for begin in range(0, len(energy), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        counted = torch.nn.functional.pad(energy[block].exp(), (0, 1), value=1.0)
        totals.index_add_(0, separation[block], counted)
    totals = sum_over_ranks(totals)
    reference = (totals[:, :-1] / totals[:, -1:].clamp(min=1) + 1e-6).log()
    for begin in range(0, len(energy), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        energy[block] = reference[separation[block]] - energy[block]
    width = float(bin_edges[1] - bin_edges[0])
    return _Distances(row_numbers, column_numbers, energy, float(bin_edges[0]) - width / 2, width)


def _peptide_springs(residue_index: Tensor, present: Tensor, like: Tensor, weight: float) -> _Springs:
    """Return springs that hold peptide bonds: their length, angles and trans form."""
    bonded = (residue_index[1:] - residue_index[:-1] == 1) & present[1:] & present[:-1]
    before = bonded.nonzero()[:, 0]
    ends = [(before * 4 + _POINTS[a], (before + 1) * 4 + _POINTS[b]) for a, b, _ in _PEPTIDE]
    length = torch.cat([like.new_full((len(before),), distance) for *_, distance in _PEPTIDE])
    first, second = (torch.cat(each) for each in zip(*ends, strict=True))
    return _Springs(first, second, length, torch.full_like(length, weight))


def _local_springs(
    points: Tensor, residue_index: Tensor, present: Tensor, weight: float, window: int
) -> _Springs:
    """Return springs that keep the pose of residues near in the chain, weaker by the square of their separation."""
    ends = []
    for apart in range(1, min(window, len(points) - 1) + 1):
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
    return _Springs(first, second, _offsets(flat, first, second)[1], weights)


def _joined(*springs: _Springs) -> _Springs:
    parts = zip(*((one.first, one.second, one.length, one.weight) for one in springs), strict=True)
    return _Springs(*(torch.cat(part) for part in parts))


def _offsets(points: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the way ``[P, 3]`` from ``second [P]`` to ``first [P]``, and its length ``[P]``, never zero."""
    offset = points.index_select(0, first) - points.index_select(0, second)
    return offset, (offset.square().sum(-1) + _EPSILON).sqrt()


def _limited(gradient: Tensor, largest: float) -> Tensor:
    """Scale vectors ``[N, 3]`` to lengths below ``largest``, smoothly."""
    return gradient / (1 + torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) / largest)
