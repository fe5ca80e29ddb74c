"""Peptide planes on a CA trace: the turn of each plane about the line between its CA atoms, by dynamic programming.

CA atoms fix the planes of trans peptides up to one turn each. The torsions of a residue depend on the planes before and
after it alone, so the best turns of a whole chain on a grid follow exactly (Viterbi 1967). Peptides before proline are
trans too: the network does not predict which of them are cis, about 5% in experiments.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.evoformer.structure.ramachandran import GRID, RamachandranPotential
from fastfold.protein import residue_constants as rc
from fastfold.protein.rigid import Rigid, quaternion_to_rotation, rotation_to_quaternion

_TURNS = 36  #: Turns of a plane that are compared, 10 degrees apart
_ROWS = 256  #: Residues whose costs are computed at a time
_ANGLE = 111.0  #: N-CA-C in degrees
_ANGLE_WEIGHT = 1 / (2 * 6.0**2)  #: Cost of a squared deviation of that angle in degrees
_END_PSI, _END_PHI = (
    math.radians(-45.0),
    math.radians(-65.0),
)  #: Torsions of the ends of chains, which nothing fixes
_BETA_ALONG, _BETA_ACROSS = 0.58, 0.81
"""Direction of CB from CA: parts along the bisector of N-CA-C, outwards, and along its normal."""


def _trans_peptide() -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return places of C and N along and across the line between CA atoms, and the distance of these, in Å."""
    n_ca, ca_c = 1.46, 1.525
    c_n = rc.between_res_bond_length_c_n[0]
    cos_c, cos_n = rc.between_res_cos_angles_ca_c_n[0], rc.between_res_cos_angles_c_n_ca[0]
    # In the plane, C is the origin and N on the x axis; the CA atoms are on different sides of it.
    first = complex(ca_c * cos_c, ca_c * math.sqrt(1 - cos_c**2))
    second = complex(c_n - n_ca * cos_n, -n_ca * math.sqrt(1 - cos_n**2))
    line = second - first
    length = abs(line)
    c, n = (-first * line.conjugate() / length, (c_n - first) * line.conjugate() / length)
    return (c.real, -c.imag), (n.real, -n.imag), length


_C, _N, _CA_CA = _trans_peptide()


class PlaneWeights(NamedTuple):
    """Weights of the terms in the cost of planes, in nats."""

    beta: float  #: Of 1 - cos of the angle between the directions of CB and those of the frames before
    predicted: float  #: Of 2 - cos - cos of the deviations of phi and psi from predicted ones


def peptide_planes(
    affines: Tensor,
    bonded: Tensor,
    potential: RamachandranPotential,
    predicted: Tensor,
    is_glycine: Tensor,
    weights: PlaneWeights,
) -> Tensor:
    """Return frames with the same CA atoms whose peptide planes have the lowest cost.

    Args:
        affines: Quaternions and CA positions in Å, ``[N, 7]``.
        bonded: ``[N - 1]``, True where a residue and the next are neighbours in a chain.
        potential: Of the residues' phi and psi.
        predicted: Phi and psi ``[N, 2]`` in radians.
        is_glycine: ``[N]``; the direction of their CB costs nothing.
        weights: Weights of the terms.

    Returns:
        Frames ``[N, 7]``. Residues without neighbours keep theirs.
    """
    if len(affines) < 2 or not bool(bonded.any()):
        return affines
    ca = affines[:, 4:]
    c, n = _turned_planes(ca)
    beta = quaternion_to_rotation(affines[:, :4]) @ ca.new_tensor([-0.36, -0.53, -0.77])
    beta = beta.masked_fill(is_glycine[:, None], 0.0)
    best = _cheapest(_Planes(ca, c, n, beta), bonded, potential, predicted, weights)
    plane = torch.arange(len(best), device=best.device)
    c, n = c[plane, best], n[plane, best]
    has_next, has_previous = _padded(bonded, 1), _padded(bonded, 0)
    before, after = torch.cat([ca[:1], ca[:-1]]), torch.cat([ca[1:], ca[-1:]])
    own_c, own_n = torch.cat([c, c[-1:]]), torch.cat([n[:1], n])
    next_n, previous_c = torch.cat([n, after[-1:]]), torch.cat([before[:1], c])
    # At the ends of chains the missing atom gets a usual torsion.
    first_n = _place(next_n, own_c, ca, _END_PSI)
    last_c = _place(previous_c, own_n, ca, _END_PHI)
    own_n = torch.where(has_previous[:, None], own_n, first_n)
    own_c = torch.where(has_next[:, None], own_c, last_c)
    frames = Rigid.from_three_points(2 * ca - own_c, ca, own_n)
    built = torch.cat([rotation_to_quaternion(frames.rotation), ca], -1)
    return torch.where((has_next | has_previous)[:, None], built, affines)


def _turned_planes(ca: Tensor) -> tuple[Tensor, Tensor]:
    """Return C of residues and N of the next ``[N - 1, turns, 3]`` for all turns of their plane."""
    line = ca[1:] - ca[:-1]
    length = torch.linalg.vector_norm(line, dim=-1, keepdim=True).clamp(min=1.0)
    along = line / length
    axis = torch.nn.functional.one_hot(along.abs().argmin(-1), 3).to(ca)
    first = torch.nn.functional.normalize(torch.linalg.cross(along, axis), dim=-1)
    second = torch.linalg.cross(along, first)
    angle = 2 * math.pi / _TURNS * torch.arange(_TURNS, device=ca.device, dtype=ca.dtype)[:, None]
    across = angle.cos() * first[:, None] + angle.sin() * second[:, None]
    stretch = (length / _CA_CA)[:, None] * along[:, None]
    start = ca[:-1, None]
    return start + _C[0] * stretch + _C[1] * across, start + _N[0] * stretch + _N[1] * across


class _Planes(NamedTuple):
    """Atoms of a trace with all turns of its peptide planes, in Å."""

    ca: Tensor  #: ``[N, 3]``
    c: Tensor  #: ``[N - 1, turns, 3]`` C of each residue but the last
    n: Tensor  #: ``[N - 1, turns, 3]`` N of each residue but the first
    beta: Tensor  #: ``[N, 3]`` direction of CB, zero of glycine


def _cheapest(
    planes: _Planes,
    bonded: Tensor,
    potential: RamachandranPotential,
    predicted: Tensor,
    weights: PlaneWeights,
) -> Tensor:
    """Return the turn ``[N - 1]`` of each plane in the path of the lowest total cost."""
    ca = planes.ca
    total = torch.zeros(_TURNS, dtype=ca.dtype)
    choices = []
    for begin in range(1, len(ca) - 1, _ROWS):
        rows = slice(begin, min(begin + _ROWS, len(ca) - 1))
        cost = _costs(planes, potential, predicted, weights, rows)
        inside = (bonded[begin - 1 : rows.stop - 1] & bonded[rows])[:, None, None]
        for each in torch.where(inside, cost, 0.0).cpu():
            total, choice = (total[:, None] + each).min(0)
            choices.append(choice)
    turn = int(total.argmin())
    turns = [turn]
    for choice in reversed(choices):
        turn = int(choice[turn])
        turns.append(turn)
    return torch.tensor(turns[::-1], device=ca.device)


def _costs(
    planes: _Planes,
    potential: RamachandranPotential,
    predicted: Tensor,
    weights: PlaneWeights,
    rows: slice,
) -> Tensor:
    """Return costs ``[n, turns, turns]`` of some residues, by the turns of the planes before and after them."""
    ca, c, n, beta = planes
    here = ca[rows, None]
    before, after = slice(rows.start - 1, rows.stop - 1), rows
    to_n, to_c = n[before] - here, c[after] - here
    unit_n, unit_c = (torch.nn.functional.normalize(x, dim=-1) for x in (to_n, to_c))
    # A torsion's cosine and sine are products of a vector of one plane with a vector of the other.
    back = c[before] - n[before]
    back = back - (back * unit_n).sum(-1, keepdim=True) * unit_n
    phi = _angle(torch.linalg.cross(back, unit_n) @ to_c.mT, back @ to_c.mT)
    ahead = n[after] - c[after]
    ahead = ahead - (ahead * unit_c).sum(-1, keepdim=True) * unit_c
    psi = _angle(to_n @ torch.linalg.cross(ahead, unit_c).mT, to_n @ ahead.mT)
    cosine = (unit_n @ unit_c.mT).clamp(-0.9999, 0.9999)
    cost = _ANGLE_WEIGHT * (torch.rad2deg(cosine.acos()) - _ANGLE).square()
    if weights.beta:
        # CB is opposite to N and C, on one side of their plane.
        old = beta[rows, :, None]
        outwards = -(unit_n @ old + (unit_c @ old).mT) / (2 + 2 * cosine).sqrt()
        across = unit_n @ torch.linalg.cross(unit_c, beta[rows, None].expand_as(unit_c)).mT
        across = across / (1 - cosine.square()).sqrt()
        is_known = (beta[rows].abs().sum(-1) > 0)[:, None, None]
        cost += weights.beta * (1 - _BETA_ALONG * outwards - _BETA_ACROSS * across) * is_known
    angle = 2 * math.pi / GRID * torch.arange(GRID, device=ca.device, dtype=ca.dtype) - math.pi
    off = 1 - (torch.cat([angle, angle[:1]]) - predicted[rows, :, None]).cos()
    off_phi, off_psi = (off[:, i].gather(1, x.flatten(1)).view_as(x) for i, x in enumerate((phi, psi)))
    return cost + (potential.at_grid(rows, phi, psi) + weights.predicted * (off_phi + off_psi))


def _angle(sine: Tensor, cosine: Tensor) -> Tensor:
    """Return the nearest number on the grid of angles, from 0 to GRID."""
    angle = torch.atan2(sine, cosine)
    return angle.add_(math.pi).mul_(GRID / (2 * math.pi)).round_().long()


def _place(a: Tensor, b: Tensor, c: Tensor, torsion: float) -> Tensor:
    """Return points ``[N, 3]`` at the N-CA-C angle b-c-d and the torsion a-b-c-d in radians."""
    axis = torch.nn.functional.normalize(c - b, dim=-1)
    normal = torch.nn.functional.normalize(torch.linalg.cross(b - a, axis), dim=-1)
    side = torch.linalg.cross(normal, axis)
    polar = math.radians(_ANGLE)
    sideways = math.cos(torsion) * side + math.sin(torsion) * normal
    return c - math.cos(polar) * axis + math.sin(polar) * sideways


def _padded(bonded: Tensor, end: int) -> Tensor:
    return torch.nn.functional.pad(bonded, (1 - end, end))
