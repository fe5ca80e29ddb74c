"""Scores under the best superposition: RMSD, TM-score and GDT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.protein.rigid import Rigid
from fastfold.utils.option_fields import LARGEST, check_whole


def superpose(moving: Tensor, fixed: Tensor, weights: Tensor) -> Rigid:
    """Compute the rigid motion of points ``[*, N, 3]`` onto their partners with the least weighted squared error.

    Kabsch 1976 (doi:10.1107/S0567739476001873), without reflections. If the best motion is not unique (fewer than three
    points, or all on a line) one of the best is returned; without any weight the identity. Lengths are in Å, ``weights
    [*, N]`` not negative; points of weight 0 may have any finite value.

    Returns:
        Motions ``[*]``: ``motion[..., None].apply(moving)`` is superposed on ``fixed``. Float64 inputs give float64,
        all others float32.
    """
    dtype = torch.float64 if torch.float64 in (moving.dtype, fixed.dtype) else torch.float32
    moving, fixed = moving.to(dtype), fixed.to(dtype)
    share = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)).to(dtype)[..., None]
    center, target = (share * moving).sum(-2), (share * fixed).sum(-2)
    covariance = (share * (fixed - target[..., None, :])).mT @ (moving - center[..., None, :])
    rotation = best_rotation(covariance)
    return Rigid(rotation, target - (rotation @ center[..., None]).squeeze(-1))


def best_rotation(covariance: Tensor) -> Tensor:
    """Return rotations ``[*, 3, 3]`` that maximise ``trace(R^T C)`` for covariances ``C [*, 3, 3]`` (fixed, moving)."""
    u, _, v = torch.linalg.svd(covariance)
    # Where the best orthogonal matrix is a reflection, flip the direction of least extent.
    last = torch.linalg.det(u) * torch.linalg.det(v)
    u = torch.cat([u[..., :2], u[..., 2:] * last.sign()[..., None, None]], -1)
    return u @ v


def rmsd(predicted: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Compute the root mean square deviation ``[*]`` in Å after the best superposition, in float64.

    Both are ``[*, N, 3]`` in Å, and ``mask [*, N]`` is 1 for the points that count. Without any the result is 0. Other
    points may have any value.

    Raises:
        InputError: Shapes differ, or a point that counts is not finite.
    """
    check_points(predicted, reference, mask)
    predicted, reference = (_counting(x.double(), mask) for x in (predicted, reference))
    moved = superpose(predicted, reference, mask)[..., None].apply(predicted)
    squared = (moved - reference).square().sum(-1)
    return ((squared * mask).sum(-1) / mask.sum(-1).clamp(min=1e-12)).sqrt()


def _counting(points: Tensor, mask: Tensor) -> Tensor:
    """Return points with zeros in place of those that do not count."""
    counting = points.masked_fill((mask == 0)[..., None], 0.0)
    check_finite(counting)
    return counting


def check_points(predicted: Tensor, reference: Tensor, mask: Tensor) -> None:
    """Check that points ``[*, N, 3]`` and their mask ``[*, N]`` belong together, or raise InputError."""
    if not all(isinstance(x, Tensor) for x in (predicted, reference, mask)):
        kinds = ", ".join(type(x).__name__ for x in (predicted, reference, mask))
        raise InputError(
            f"expected tensors of points, points and a mask, found {kinds}; torch.as_tensor makes them"
        )
    if not predicted.shape == reference.shape == (*mask.shape, 3):
        raise InputError(
            "expected points [*, N, 3] of both structures and a mask [*, N], found shapes "
            f"{list(predicted.shape)}, {list(reference.shape)} and {list(mask.shape)}"
        )


def check_finite(points: Tensor) -> None:
    """Check that all positions ``[*, 3]`` are finite, or raise InputError."""
    if not points.isfinite().all():
        raise InputError("a position is not finite; correct it, or leave it out by the mask")


GDT_TS_CUTOFFS = (1.0, 2.0, 4.0, 8.0)
GDT_HA_CUTOFFS = (0.5, 1.0, 2.0, 4.0)
_ROUNDS = 20  #: Maximum number of refinements of a superposition after its first selection of residues
_SEEDS_PER_LENGTH = 512
_BLOCK = 1 << 17  #: Distances of a block, which fit a core's cache


def tm_score(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    *,
    reference_length: int | None = None,
    quick: bool = False,
) -> float:
    """Compute the template modelling score (TM-score) of a chain with one-to-one corresponding residues.

    Zhang & Skolnick 2004 (doi:10.1002/prot.20264): the largest mean of ``1 / (1 + (d / d0)^2)`` of any superposition,
    by the paper's search. From every fragment of N, N/2, N/4, N/8, N/16 and 4 residues, the residues that come near
    are superposed again until the selection is stable. Chains of more than 512 residues start from every second,
    third, ... fragment.

    Args:
        predicted: CA positions ``[N, 3]`` in Å.
        reference: ``[N, 3]`` in Å.
        mask: ``[N]``, 1 for residues of both structures.
        reference_length: Number of residues of the whole reference, which normalises the score; None for the number in
            the mask.
        quick: Start from few fragments only, of N, N/2 and N/4 residues that overlap by half. The score may be lower.

    Raises:
        ConfigError: ``reference_length`` is not a whole number.
        InputError: Shapes differ, a position in the mask is not finite, or the reference has fewer residues than the
            mask.

    Example:
        >>> import torch
        >>> from fastfold.protein import tm_score
        >>> reference = 3.8 * torch.eye(3).repeat(10, 1).cumsum(0)
        >>> round(tm_score(reference @ torch.eye(3).roll(1, 0) + 5.0, reference, torch.ones(30)), 3)
        1.0
    """
    points = _Points.of(predicted, reference, mask)
    length = _length(points, reference_length)
    d0 = tm_score_scale(length)
    best = 0.0
    fragments = _fragments(points, quick=quick)
    for squared in _superpositions(points, *_search_radii(length), fragments):
        best = max(best, squared.div_(d0 * d0).add_(1.0).reciprocal_().sum(-1).max().item())
    return best / max(length, 1)


def tm_score_scale(length: int) -> float:
    """Return the distance d0 in Å that scores one half, for ``length`` reference residues."""
    return max(0.5, 1.24 * (length - 15) ** (1 / 3) - 1.8) if length > 15 else 0.5


def gdt(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    *,
    cutoffs: Sequence[float] = GDT_TS_CUTOFFS,
    reference_length: int | None = None,
) -> float:
    """Compute the global distance test (GDT): mean over cutoffs of the largest share of near residues.

    Zemla 2003 (doi:10.1093/nar/gkg571). Superpositions are searched as in :func:`tm_score`, and again for each cutoff
    with the cutoff as the selection radius. As in LGA the result is a lower bound of the true maximum. It is never
    under the result of the TM-score program, which skips the second search.

    Cutoffs are one or more distances in Å: :data:`GDT_TS_CUTOFFS` (total score) or :data:`GDT_HA_CUTOFFS` (high
    accuracy). The other arguments and the errors are those of :func:`tm_score`; the score is in [0, 1].

    Example:
        >>> import torch
        >>> from fastfold.protein import gdt
        >>> reference = 3.8 * torch.eye(3).repeat(10, 1).cumsum(0)
        >>> gdt(reference + 5.0, reference, torch.ones(30))
        1.0
    """
    if not len(cutoffs):
        raise InputError("expected at least one cutoff in Å, found none")
    return sum(gdt_shares(predicted, reference, mask, cutoffs, reference_length)) / len(cutoffs)


def gdt_shares(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    cutoffs: Sequence[float],
    reference_length: int | None = None,
) -> list[float]:
    """Return the share of residues within each cutoff (Å); :func:`gdt` is their mean and has the same arguments."""
    points = _Points.of(predicted, reference, mask)
    length = _length(points, reference_length)
    best = [0] * len(cutoffs)
    for radii in [_search_radii(length), *((cutoff, cutoff) for cutoff in cutoffs)]:
        for squared in _superpositions(points, *radii, _fragments(points)):
            for i, cutoff in enumerate(cutoffs):
                best[i] = max(best[i], int((squared <= cutoff * cutoff).sum(-1).max()))
    return [count / max(length, 1) for count in best]


def _search_radii(length: int) -> tuple[float, float]:
    """Return the radii in Å of the first and of later selections in the TM-score search."""
    near = min(max(tm_score_scale(length), 4.5), 8.0)
    return near - 1.0, near + 1.0


@dataclass(frozen=True)
class _Points:
    """Corresponding points, with the per-point terms of all sums and distances."""

    #: ``[n, 16]``: products of the coordinates (fixed, moving), the moving ones, the fixed ones, and 1. Their sums
    #: over a selection are its covariance and centers. Squared distances are linear in them.
    moments: Tensor
    squares: Tensor  #: ``[n]``, sum of the squared lengths of both vectors, in Å²

    @staticmethod
    def of(predicted: Tensor, reference: Tensor, mask: Tensor) -> _Points:
        check_points(predicted, reference, mask)
        if mask.ndim != 1:
            raise InputError(f"expected one structure with points [N, 3], found {list(predicted.shape)}")
        chosen = mask.detach() > 0.5
        moving, fixed = (x.detach().double()[chosen] for x in (predicted, reference))
        check_finite(moving)
        check_finite(fixed)
        if len(moving):
            # Centered points keep the rounding errors of the sums far under 1e-9 Å.
            moving, fixed = moving - moving.mean(0), fixed - fixed.mean(0)
        products = (fixed[:, :, None] * moving[:, None, :]).flatten(1)
        moments = torch.cat([products, moving, fixed, torch.ones_like(moving[:, :1])], -1)
        return _Points(moments, moving.square().sum(-1) + fixed.square().sum(-1))

    @property
    def count(self) -> int:
        return len(self.moments)

    def squared_distances(self, selected: Tensor) -> Tensor:
        """Return squared distances ``[S, n]`` in Å² after superposing the points of each ``selected [S, n]``."""
        sums = selected @ self.moments
        mean = sums / sums[:, -1:]
        center, target = mean[:, 9:12], mean[:, 12:15]
        rotation = best_rotation(mean[:, :9].unflatten(-1, (3, 3)) - target[:, :, None] * center[:, None, :])
        shift = target - (rotation @ center[:, :, None]).squeeze(-1)
        # |R x + t - y|^2 = |x|^2 + |y|^2 - 2 y.R x + 2 (R^T t).x - 2 t.y + |t|^2
        turned = (shift[:, None, :] @ rotation).squeeze(1)
        square = shift.square().sum(-1, keepdim=True)
        linear = torch.cat([-2.0 * rotation.flatten(1), 2.0 * turned, -2.0 * shift, square], -1)
        return torch.addmm(self.squares, linear, self.moments.mT).clamp_(min=0.0)


def _length(points: _Points, reference_length: int | None) -> int:
    """Return the number of residues that a score is normalised by."""
    if reference_length is None:
        return points.count
    check_whole("reference_length", reference_length, 0, LARGEST)
    if reference_length < points.count:
        raise InputError(
            f"a reference of {reference_length} residues has {points.count} in the mask; correct reference_length"
        )
    return reference_length


def _superpositions(
    points: _Points, first_radius: float, radius: float, fragments: Tensor
) -> Iterator[Tensor]:
    """Yield squared distances ``[S, n]`` of successive sets of superpositions; callers may overwrite them.

    The first are those of ``fragments [S, n]``. After a fragment's superposition the residues within ``first_radius`` Å
    are superposed, and later those within ``radius`` Å.
    """
    if points.count == 0:
        return
    # Selections with equal sums of random labels are equal, and need only one superposition.
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(points.count, generator=generator, dtype=torch.float64).to(points.squares.device)
    seen = labels[:0]
    waiting = fragments
    for turn in range(_ROUNDS + 1):
        following = []
        for selected in waiting.split(max(1, _BLOCK // points.count)):
            squared = points.squared_distances(selected.double())
            if turn < _ROUNDS:
                following.append(_nearest(squared, first_radius if turn == 0 else radius))
            yield squared
        if not following:
            return
        waiting = torch.cat(following)
        # Only later rounds share a radius, so only their selections can repeat.
        names, index = torch.unique((waiting.double() @ labels).round(decimals=10), return_inverse=True)
        first = torch.full_like(names, len(waiting), dtype=torch.long)
        first.scatter_reduce_(0, index, torch.arange(len(waiting), device=first.device), "amin")
        new = ~torch.isin(names, seen)
        seen = torch.cat([seen, names[new]])
        waiting = waiting[first[new]]
        if len(waiting) == 0:
            return


def _nearest(squared: Tensor, radius: float) -> Tensor:
    """Select points ``[S, n]`` under ``radius`` Å, which grows by steps of 0.5 Å until three are selected."""
    near = squared < radius * radius
    few = near.sum(-1) < min(3, squared.shape[-1])
    if few.any():
        third = squared[few].topk(min(3, squared.shape[-1]), largest=False).values[:, -1:].sqrt()
        wider = radius + 0.5 * (((third - radius) / 0.5).floor() + 1.0)
        near[few] = squared[few] < wider.square()
    return near


def _fragments(points: _Points, *, quick: bool = False) -> Tensor:
    """Return selections ``[S, n]`` of consecutive points, the fragments of :func:`tm_score`."""
    n = points.count
    shortest = min(4, n)
    lengths = sorted({max(n >> i, shortest) for i in range(3 if quick else 5)}, reverse=True)
    if not quick and lengths[-1] != shortest:
        lengths.append(shortest)
    at = torch.arange(n, device=points.squares.device)
    pieces = []
    for length in lengths:
        step = max(1, length // 2) if quick else -(-(n - length + 1) // _SEEDS_PER_LENGTH)
        starts = at[: n - length + 1 : step, None]
        pieces.append((at >= starts) & (at < starts + length))
    return torch.cat(pieces)
