"""Potentials between residues: the distances that a distogram predicts, overlaps, springs and the twist of strands.

All forces act between two points, so their gradients are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastfold.evoformer.confidence.scores import row_blocks
from fastfold.evoformer.execution import LazyRows

_EPSILON = 1e-6  #: In Å²; keeps directions finite for two points at the same position


class PointPairs:
    """Pairs ``[P]`` of int64 numbers of points between which forces act, among ``points`` in all."""

    def __init__(self, first: Tensor, second: Tensor, points: int) -> None:
        self.first, self.second, self.count = first, second, points
        ends = torch.cat([first, second])
        # Each point adds its pairs in the order of their numbers, so that a sum always has the same bits.
        order = ends.sort(stable=True).indices
        counts = torch.bincount(ends, minlength=points)
        self._pair = (order % max(1, len(first))).int()
        self._sign = torch.where(order < len(first), 1.0, -1.0)
        self._begin = (counts.cumsum(0) - counts).int()

    def repeated(self, copies: int) -> PointPairs:
        """Return the same pairs of each of ``copies`` sets of points, whose points are numbered one after the other."""
        start = self.count * torch.arange(copies, device=self.first.device)[:, None]
        first, second = ((start + ends).flatten() for ends in (self.first, self.second))
        return PointPairs(first, second, copies * self.count)

    def offsets(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the way ``[P, 3]`` from second to first ``points [N, 3]`` in Å, and its length ``[P]``, never zero."""
        rows = _wide_rows(points)
        wide = _selected(rows, self.first) - _selected(rows, self.second)
        x, y, z, *_ = wide.square().unbind(-1)  # a sum over so few elements is slow
        return wide[:, :3], (x + y).add_(z).add_(_EPSILON).sqrt_()

    def forces(self, pull: Tensor, offset: Tensor) -> Tensor:
        """Return the sum ``[N, 3]`` of ``pull [P]`` times ``offset [P, 3]``, negative for second points."""
        return torch.nn.functional.embedding_bag(
            self._pair,
            pull[:, None] * offset,
            self._begin,
            mode="sum",
            per_sample_weights=self._sign.to(offset),
        )


def _wide_rows(points: Tensor) -> Tensor:
    """Return points as numbers of 16 bytes ``[N]``, which are selected faster than rows.

    Points in float64, and those on a device that may lack such numbers (Apple GPUs do), stay ``[N, 3]``.
    """
    if points.dtype != torch.float32 or points.device.type not in ("cpu", "cuda"):
        return points
    return torch.nn.functional.pad(points, (0, 1)).view(torch.complex128).squeeze(-1)


def _selected(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return some of :func:`_wide_rows`, ``[P, 3]`` or wider."""
    selected = rows.index_select(0, numbers)
    return selected.view(torch.float32).view(-1, 4) if selected.is_complex() else selected


NEAREST = 3
"""Least separation in the chain of pairs with a potential and overlaps; peptide geometry holds nearer ones."""

_CLASSES = 40  #: Separations in the chain above this share one reference distribution
_PAIR = 5 * 8  #: Bytes of the numbers of a pair and its separation, and of its places in sums of forces
_PAIR_STEP = 160  #: Bytes of a pair while its forces are computed
_BLOCK = 2**18  #: Pairs whose forces are computed at a time
_SKIN = 4.0  #: Distance in Å beyond that of overlaps up to which pairs are listed
_LDDT = (0.5, 1.0, 2.0, 4.0)  #: Thresholds of lDDT in Å
_LDDT_RADIUS = 15.0  #: Distances in Å up to which lDDT counts pairs in the experiment
_LDDT_WIDTH = 0.3  #: Width in Å of the smooth steps at the thresholds, about that of a bin


@dataclass(frozen=True)
class Distances:
    """Potential of CB distances of P pairs of residues."""

    blocks: Sequence[PointPairs]  #: The pairs, in blocks whose forces are computed at a time
    separation: Tensor  #: Classes of separations in the chain ``[P]``, int64
    #: ``[P, bins]`` in nats: the negative logarithm of the distribution over that of its class
    energy: Tensor
    reference: Tensor  #: Logarithm of the mean distributions of the classes, ``[classes, bins]``
    start: float  #: Middle of the first bin in Å
    width: float  #: Width of a bin in Å
    copies: int = 1  #: Number of structures with these pairs, whose points are numbered one after the other

    @classmethod
    def from_logits(
        cls,
        logits: Tensor | LazyRows,
        bin_edges: Tensor,
        residue_index: Tensor,
        present: Tensor,
        first_row: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Distances:
        """Create the potential of the pairs of this process, each once.

        Without the reference, a structure would grow: most pairs are far apart, and an uncertain pair would be pushed
        there too.

        Arguments are those of :func:`fastfold.evoformer.structure.distogram_descent.descend`; ``present [N]`` is False
        for padding.
        """
        device, bins = present.device, logits.shape[-1]
        own = torch.arange(first_row, first_row + logits.shape[-3], device=device)
        first, second, classes = [own[:0]], [own[:0]], [own[:0]]
        for rows in own.split(256):
            apart = (residue_index[rows, None] - residue_index[None]).abs()
            later = torch.arange(len(present), device=device) > rows[:, None]
            row, column = (later & (apart >= NEAREST) & present[rows, None] & present).nonzero(as_tuple=True)
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
        for block in _blocks(len(energy)):
            counted = torch.nn.functional.pad(energy[block].exp(), (0, 1), value=1.0)
            totals.index_add_(0, separation[block], counted)
        totals = sum_over_ranks(totals)
        reference = (totals[:, :-1] / totals[:, -1:].clamp(min=1) + 1e-6).log()
        for block in _blocks(len(energy)):
            energy[block] = reference[separation[block]] - energy[block]
        width = float(bin_edges[1] - bin_edges[0])
        return cls(
            pair_blocks(row_numbers, column_numbers, len(present)),
            separation,
            energy,
            reference,
            float(bin_edges[0]) - width / 2,
            width,
        )

    def repeated(self, copies: int) -> Distances:
        """Return the same potential of each of ``copies`` structures, which shares the energies."""
        blocks = [pairs.repeated(copies) for pairs in self.blocks]
        return replace(self, blocks=blocks, copies=copies * self.copies)

    def add_expected_scores(self, share: float, lddt: float, agreement: float) -> None:
        """Replace the potential by ``share`` of it less weighted expected scores of each pair, in place.

        The expected lDDT of a distance is the mean, over the distances that are predicted below 15 Å, of the share of
        lDDT's four thresholds that it meets. The agreement is the mean of ``1 / (1 + e²)`` for errors ``e`` in Å, over
        all distances but those of the last bin, less that under the reference, so that pairs of unknown distance do
        not pull. Both are bounded, so uncertain pairs do not pull against certain ones.
        """
        middles = self.start + self.width * torch.arange(self.energy.shape[-1], device=self.energy.device)
        error = (middles[:, None] - middles).abs()
        met = torch.stack([torch.sigmoid((limit - error) / _LDDT_WIDTH) for limit in _LDDT]).mean(0)
        met *= (middles < _LDDT_RADIUS)[:, None]
        agrees = agreement / (1 + error.square())
        agrees[-1] = 0.0  # the last bin has no upper edge
        scores = lddt * met + agrees
        expected = self.reference.exp() @ agrees
        for block in _blocks(len(self.energy)):
            energy, classes = self.energy[block], self.separation[block]
            probability = (self.reference[classes] - energy).exp()
            self.energy[block] = share * energy - probability @ scores + expected[classes]

    def total(self, points: Tensor) -> Tensor:
        """Return the sum over pairs for ``points [N, 3]`` in Å, a scalar."""
        total = points.new_zeros(())
        for pairs, energy in self._parts():
            _, distance = pairs.offsets(points)
            near, rest, _ = self._bins(distance, energy)
            spline = 0.5 * (0.5 - rest).square(), 0.75 - rest.square(), 0.5 * (0.5 + rest).square()
            total += sum((of_bin * each).sum() for of_bin, each in zip(near, spline, strict=True))
        return total

    def forces(self, points: Tensor) -> Tensor:
        """Return the gradient ``[N, 3]`` of the sum over pairs with respect to ``points [N, 3]`` in Å."""
        total = torch.zeros_like(points)
        for pairs, energy in self._parts():
            offset, distance = pairs.offsets(points)
            (before, middle, after), rest, inside = self._bins(distance, energy)
            slope = before * (rest - 0.5) - 2 * middle * rest + after * (rest + 0.5)
            total += pairs.forces(slope * inside / (self.width * distance), offset)
        return total

    def overlap(self, points: Tensor, distance: float, weight: float) -> Tensor:
        """Return the sum of ``weight * max(distance - d, 0)²`` over pairs of ``points [N, 3]`` in Å, a scalar."""
        total = points.new_zeros(())
        for pairs in self.blocks:
            _, lengths = pairs.offsets(points)
            total += weight * torch.relu(distance - lengths).square().sum()
        return total

    def _parts(self) -> Iterator[tuple[PointPairs, Tensor]]:
        """Yield blocks of pairs with their energies ``[P, bins]``."""
        return zip(self.blocks, self.energy.split(_BLOCK), strict=True)

    def _bins(self, distance: Tensor, energy: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return energies of the three bins next to distances, the way to the middle one, and where a slope is.

        Quadratic B-splines over the bins have a continuous slope; it is zero beyond the first and last bin.
        """
        bins = energy.shape[-1]
        position = (distance - self.start) / self.width
        inside = (position > 0.5) & (position < bins - 1.5)
        position = position.clamp(0.5, bins - 1.501)
        middle = (position + 0.5).floor()
        row = torch.arange(0, energy.numel(), bins, device=energy.device)
        before = (row + middle.long().view(self.copies, -1) - 1).flatten()
        flat = energy.view(-1)
        return (
            [flat[step:].index_select(0, before) for step in range(3)],
            position - middle,
            inside,
        )


class Overlaps:
    """Pairs of points that push each other apart below a distance, from a list of those that are near.

    Few pairs of a fold are near each other. The list is written again before a pair that it lacks can overlap.
    """

    def __init__(self, blocks: Sequence[PointPairs], distance: float, points: int) -> None:
        """Choose among pairs, in blocks whose lengths are computed at a time, of ``points`` in all."""
        self._blocks, self._distance, self._points = blocks, distance, points
        self._listed: Tensor | None = None
        self._near: PointPairs | None = None

    def forces(self, points: Tensor, weight: float) -> Tensor:
        """Return the gradient ``[N, 3]`` of :meth:`Distances.overlap` with respect to ``points [N, 3]`` in Å."""
        pairs = self._list(points)
        offset, distance = pairs.offsets(points)
        return pairs.forces(-2 * weight * torch.relu(self._distance - distance) / distance, offset)

    def _list(self, points: Tensor) -> PointPairs:
        if self._near is None or self._listed is None or self._is_outdated(self._listed, points):
            ends = []
            for pairs in self._blocks:
                near = (pairs.offsets(points)[1] < self._distance + _SKIN).nonzero()[:, 0]
                ends.append((pairs.first[near], pairs.second[near]))
            first, second = (torch.cat(each) for each in zip(*ends, strict=True))
            self._listed, self._near = points, PointPairs(first, second, self._points)
        return self._near

    def _is_outdated(self, listed: Tensor, points: Tensor) -> bool:
        return bool((points - listed).square().sum(-1).max() > (_SKIN / 2) ** 2)


@dataclass(frozen=True)
class Springs:
    """Springs between S pairs of points."""

    pairs: PointPairs
    length: Tensor  #: ``[S]`` in Å
    weight: Tensor  #: ``[S]`` per Å²

    def repeated(self, copies: int) -> Springs:
        """Return the same springs in each of ``copies`` structures, whose points are numbered one after the other."""
        return Springs(self.pairs.repeated(copies), self.length.repeat(copies), self.weight.repeat(copies))

    def total(self, points: Tensor) -> Tensor:
        """Return the sum of ``weight * (distance - length)²`` for ``points [P, 3]``, a scalar."""
        _, distance = self.pairs.offsets(points)
        return (self.weight * (distance - self.length).square()).sum()

    def forces(self, points: Tensor) -> Tensor:
        """Return the gradient ``[P, 3]`` of :meth:`total` with respect to ``points [P, 3]``."""
        offset, distance = self.pairs.offsets(points)
        return self.pairs.forces(2 * self.weight * (distance - self.length) / distance, offset)


def potential_bytes(rows: int, residues: int, bins: int, *, copies: int = 1) -> int:
    """Return the bytes of :class:`Distances` for ``rows`` of the pair of ``residues``, with those of its forces.

    Args:
        rows: Rows of this process.
        residues: All residues.
        bins: Bins of the distogram.
        copies: Number of structures whose forces are computed together; more than 1 have numbers of their own.
    """
    pairs = rows * residues // 2
    numbers = copies if copies == 1 else copies + 1
    return pairs * (4 * bins + numbers * _PAIR) + copies * min(pairs, _BLOCK) * _PAIR_STEP


def pair_blocks(first: Tensor, second: Tensor, points: int) -> list[PointPairs]:
    """Return pairs ``first [P]`` and ``second [P]`` of N points in blocks whose forces are computed at a time."""
    parts = zip(first.split(_BLOCK), second.split(_BLOCK), strict=True)
    return [PointPairs(*part, points) for part in parts]


def _blocks(pairs: int) -> Iterator[slice]:
    return (slice(begin, begin + _BLOCK) for begin in range(0, pairs, _BLOCK))


_SMOOTH, _REACH = 3, 4
"""Residues on each side whose mean smooths the chain, and residues on each side that give its direction."""
_EXTENDED = 8.0
"""Least distance in Å of CA atoms four residues apart in a strand; 6 in a helix, 13 in a strand."""
_NEAR = 13.0  #: Largest distance in Å of neighbours in a sheet, also of the second next
_APART = 8  #: Least separation in the chain of two strands


def strand_twist(ca: Tensor, residue_index: Tensor) -> Tensor:
    """Return the twist of a chain, a scalar: positive in 80% of proteins, negative in their mirror images.

    Strands that pair are turned against each other, always to the same side (Chothia, J. Mol. Biol. 75, 1973).
    Distances are the same in a mirror image, so only the twist tells a fold from it.

    Each pair of near residues in extended parts adds the sine of the angle of their directions about the line between
    them, times the cosine. So parallel and antiparallel pairs agree.

    The CA positions are ``[N, 3]`` in Å; a gap in ``residue_index [N]`` parts chains.
    """
    if len(ca) <= 2 * _REACH:
        return ca.new_zeros(())
    reach = torch.arange(_REACH, len(ca) - _REACH, device=ca.device)
    whole = residue_index[reach + _REACH] - residue_index[reach - _REACH] == 2 * _REACH
    extended = whole & (torch.linalg.vector_norm(ca[reach + 2] - ca[reach - 2], dim=-1) > _EXTENDED)
    centered = ca - ca.mean(0)
    padded = torch.cat([centered[:1].expand(_SMOOTH, 3), centered, centered[-1:].expand(_SMOOTH, 3)])
    smooth = padded.unfold(0, 2 * _SMOOTH + 1, 1).mean(-1)
    reach = reach[extended]
    point = smooth[reach]
    way = torch.nn.functional.normalize(smooth[reach + _REACH] - smooth[reach - _REACH], dim=-1)
    # (a x b) . (q - p) for directions a and b at p and q, in products of matrices.
    moment = way @ torch.linalg.cross(way, point).T
    distance = torch.cdist(point, point)
    counted = (distance < _NEAR) & (reach[None] - reach[:, None] >= _APART)
    twist = -(moment + moment.T) * (way @ way.T) / distance.clamp(min=1e-3)
    return twist[counted].sum()
