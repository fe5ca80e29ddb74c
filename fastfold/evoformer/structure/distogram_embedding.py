"""Structures from a distogram alone: distances become points, and local poses of another structure turn with them.

The expected distances of near pairs and the chain make a graph, whose shortest paths estimate the other distances
(Tenenbaum, de Silva and Langford, Science 290, 2000). Classical scaling places the points. Distances do not tell a
fold from its mirror image, so both are returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastfold.evoformer.confidence.scores import row_blocks
from fastfold.evoformer.execution import LazyRows
from fastfold.evoformer.structure.restraint_springs import POINTS, RestraintSprings
from fastfold.protein.metrics.tm_score import best_rotation, superpose
from fastfold.protein.rigid import quaternion_to_rotation, rotation_to_quaternion
from fastfold.utils.device import to_float64

_FAR = 0.3  #: Probability of the last bin from which a pair counts as far apart, at an unknown distance
_RISE = 3.8  #: Distance of neighbouring CA atoms in Å, the most that a residue adds along the chain
_STRAIGHT, _SHRINK = 20.0, 0.6
"""Distance in Å from which shortest paths, which bend, are shortened, and the factor for the rest."""
_WINDOW = 3  #: Residues on each side that turn a frame
_MATRICES = 6  #: Square float64 matrices of the embedding at once


def mirror_images(
    affines: Tensor,
    logits: Tensor | LazyRows,
    bin_edges: Tensor,
    *,
    residue_index: Tensor,
    present: Tensor,
    first_row: int = 0,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
    restraints: RestraintSprings | None = None,
) -> list[Tensor]:
    """Return frames ``[N, 7]`` of two mirror images at the distances of a distogram, with equal local poses.

    Both are superposed on the given structure. Restrained residues are at most as far apart as their limits. Residues
    that are not ``present [N]`` stay. Arguments are those of
    :func:`fastfold.evoformer.structure.distogram_descent.descend`.
    """
    length = len(affines)
    width = float(bin_edges[1] - bin_edges[0])
    middles = bin_edges[0] - width / 2 + width * torch.arange(len(bin_edges) + 1, device=bin_edges.device)
    distance = torch.zeros(length, length, device=affines.device)
    for rows, part in row_blocks(logits):
        probability = part.float().softmax(-1)
        expected = (probability * middles).sum(-1)
        unknown = probability[..., -1] > _FAR
        distance[first_row + rows.start : first_row + rows.stop] = expected.masked_fill(unknown, torch.inf)
    chosen, fixed = present.cpu(), affines[present, 4:].cpu().double()
    distance = sum_over_ranks(distance)
    if restraints is not None:
        restraints.shorten(distance)
    known = distance.cpu().double()[chosen][:, chosen]
    points = _embed(known, residue_index.cpu()[chosen])
    images = []
    for image in (points, points * points.new_tensor([1.0, 1.0, -1.0])):
        # The embedding has no position and no axes of its own.
        placed = superpose(image, fixed, torch.ones(len(fixed)))[..., None].apply(image)
        mirrored = affines.clone()
        mirrored[present] = turned(affines[present], placed.to(affines))
        images.append(mirrored)
    return images


def turned(affines: Tensor, points: Tensor) -> Tensor:
    """Move frames ``[N, 7]`` to other CA ``points [N, 3]``, and turn each as the residues around it turn.

    Rotations are proper, so a mirror image keeps the handedness of each residue.
    """
    length = len(affines)
    near = torch.arange(length)[:, None] + torch.arange(-_WINDOW, _WINDOW + 1)
    target, source = to_float64(points), to_float64(affines[:, 4:])
    weight = ((near >= 0) & (near < length)).to(target)[..., None]
    near = near.clamp(0, length - 1).to(target.device)

    def centered(x: Tensor) -> Tensor:
        around = x[near]
        return (around - (around * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)) * weight

    covariance = centered(target).transpose(1, 2) @ centered(source)
    rotation = best_rotation(covariance).to(affines) @ quaternion_to_rotation(affines[:, :4])
    return torch.cat([rotation_to_quaternion(rotation), points], -1)


def start_at_templates(affines: Tensor, restraints: RestraintSprings) -> Tensor:
    """Move frames ``[N, 7]`` to the places of their residues in forced templates, each superposed on them."""
    points = affines[:, 4:].clone()
    for one in restraints.templates:
        residues = one.points // POINTS
        points[residues] = one.placed(points[residues])
    return turned(affines, points)


def embedding_bytes(residues: int) -> int:
    """Return the bytes that :func:`mirror_images` takes."""
    return (4 + 8 * _MATRICES) * residues**2


def _embed(distance: Tensor, residue_index: Tensor) -> Tensor:
    """Return points ``[N, 3]`` at distances ``[N, N]`` in Å; those that are infinite follow from the others."""
    distance = torch.minimum(distance, distance.T)
    distance = torch.minimum(distance, _RISE * (residue_index[:, None] - residue_index).abs())
    for middle in range(len(distance)):
        torch.minimum(distance, distance[:, middle, None] + distance[middle], out=distance)
    distance = torch.where(distance > _STRAIGHT, _STRAIGHT + _SHRINK * (distance - _STRAIGHT), distance)
    squared = distance.square()
    gram = (squared.mean(0) + squared.mean(1, keepdim=True) - squared.mean() - squared) / 2
    values, vectors = torch.linalg.eigh(gram)
    return vectors[:, -3:] * values[-3:].clamp(min=0).sqrt()
