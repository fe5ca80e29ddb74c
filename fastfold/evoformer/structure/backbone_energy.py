"""Energy of a protein's backbone: peptide bonds, torsions and overlaps of atoms, with their gradients.

The gradients are written out: steps of recorded operations on so few numbers would take longer than the distances of
all pairs. ``tests/evoformer/structure/test_backbone_energy.py`` states the energy and compares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastfold.evoformer.structure.distogram_potential import PointPairs
from fastfold.evoformer.structure.ramachandran import RamachandranPotential
from fastfold.protein import residue_constants as rc

_N, _CA, _C, _CB, _O = range(5)
_ATOMS = 5  #: Atoms of a residue that may overlap with others: N, CA, C, CB and O
_PAIRS = (  # of an atom of a residue and one of the next, with their distance in Å in a trans peptide
    (_C, _N, rc.between_res_bond_length_c_n[0]),
    (_CA, _N, 2.425),
    (_C, _CA, 2.435),
    (_CA, _CA, rc.ca_ca_distance),
)
_LEFT_HANDED = math.radians(100.0)  #: Phi at which residues other than glycine have the highest energy
_NEAR = (
    (2.9, 3.1, 3.1, 3.1, 2.75),
    (3.1, 4.1, 3.5, 3.9, 3.1),
    (3.1, 3.5, 3.4, 3.5, 3.0),
    (3.1, 3.9, 3.5, 4.3, 3.1),
    (2.75, 3.1, 3.0, 3.1, 2.9),
)
"""Distances in Å of N, CA, C, CB and O from those of another residue below which atoms overlap."""
_APART = 2  #: Least separation in a chain of residues whose atoms may overlap
_REACH, _SKIN = 9.5, 1.2
"""Distances in Å of CA atoms of listed pairs, and beyond an overlap of their atoms: room for some steps."""
_ROWS = 1024  #: Residues whose pairs are listed at a time
_OXYGEN_FROM_CA, _OXYGEN_FROM_N = 0.762, 0.896
"""O is at C + x (C - CA) + y (C - N of the next), for planar peptides 1.23 Å away at its usual angles."""
_EPSILON = 1e-6  #: In Å²; keeps directions finite where points coincide


class BackboneWeights(NamedTuple):
    """Weights of the terms of the energy."""

    bond: float  #: Of peptide bonds' squared deviations from their length, per Å²
    angle: float  #: Of those of the distances that fix angles at C and N, per Å²
    ca_ca: float  #: Of those of CA distances, per Å²
    omega: float  #: Of 1 + cos omega
    ramachandran: float  #: Of the Ramachandran potential
    hand: float  #: Of 1 + cos(phi - 100 degrees) for residues other than glycine
    predicted: float  #: Of 2 - cos - cos of the deviations of phi and psi from predicted ones
    overlap: float  #: Of squared overlaps of atoms, per Å²


class BackboneEnergy:
    """Energy of the backbone of N residues, by the positions of N, CA, C and CB."""

    def __init__(
        self,
        aatype: Tensor,
        residue_index: Tensor,
        present: Tensor,
        *,
        potential: RamachandranPotential,
        predicted: Tensor,
        weights: BackboneWeights,
    ) -> None:
        """Choose the terms.

        Args:
            aatype: ``[N]``.
            residue_index: ``[N]``; neighbours in a chain differ by 1.
            present: ``[N]``, False for padding.
            potential: Of the residues' phi and psi.
            predicted: Phi and psi ``[N, 2]`` in radians.
            weights: Weights of the terms.
        """
        bonded = bonds(residue_index, present)
        self._residue_index, self._weights = residue_index, weights
        is_glycine = aatype == rc.restype_order["G"]
        self._has_atom = present[:, None].repeat(1, _ATOMS)
        self._has_atom[:, _CB] &= ~is_glycine
        self._has_atom[:, _O] &= pad(bonded, (0, 1))
        self._near = predicted.new_tensor(_NEAR)
        self._potential = potential
        has_torsions = (pad(bonded, (1, 0)) & pad(bonded, (0, 1)))[:, None].to(predicted)
        self._ramachandran = weights.ramachandran * has_torsions
        self._amplitude, self._phase = _cosines(bonded, has_torsions, ~is_glycine, predicted, weights)
        self._springs = _peptide_springs(bonded, predicted, weights)
        # Gradients by N, CA, C, CB and the next N, from those by N, CA, C, CB and O.
        self._by_points = torch.eye(_ATOMS).to(predicted)
        self._by_points[[_CA, _C, _O], _O] = predicted.new_tensor(
            [-_OXYGEN_FROM_CA, 1 + _OXYGEN_FROM_CA + _OXYGEN_FROM_N, -_OXYGEN_FROM_N]
        )
        self._pairs: tuple[PointPairs, _Springs] | None = None

    def gradient(self, points: Tensor, ramachandran: float = 1.0) -> Tensor:
        """Return the gradient ``[N, 4, 3]`` of the energy by ``points [N, 4, 3]``: N, CA, C and CB in Å.

        Overlaps count between the atoms of :meth:`list_overlaps`, which is called before. The Ramachandran term has a
        further factor.
        """
        gradient = self._pair_forces(points)
        gradient[:, :_CB].add_(self._torsion_forces(points, ramachandran))
        return gradient

    def list_overlaps(self, points: Tensor) -> None:
        """List the pairs of atoms that may overlap while ``points [N, 4, 3]`` move less than about half an Å."""
        ca = points[:, _CA]
        number = torch.arange(len(ca), device=ca.device)
        atoms, has, near = _with_oxygen(points), self._has_atom, self._near
        lists = [self._springs]
        for rows in number.split(_ROWS):
            apart = (self._residue_index[rows, None] - self._residue_index).abs() >= _APART
            close = (torch.cdist(ca[rows], ca) < _REACH) & apart & (number > rows[:, None])
            first, second = close.nonzero(as_tuple=True)
            first = rows[first]
            both = has[first, :, None] & has[second, None]
            both &= torch.cdist(atoms[first], atoms[second]) < near + _SKIN
            pair, a, b = both.nonzero(as_tuple=True)
            length = near[a, b]
            ends = _ATOMS * first[pair] + a, _ATOMS * second[pair] + b
            weight = torch.full_like(length, 2 * self._weights.overlap)
            lists.append(_Springs(*ends, length, weight, torch.zeros_like(length)))
        springs = _Springs(*map(torch.cat, zip(*lists, strict=True)))
        self._pairs = PointPairs(springs.first, springs.second, _ATOMS * len(ca)), springs

    def _pair_forces(self, points: Tensor) -> Tensor:
        assert self._pairs is not None
        pairs, springs = self._pairs
        offset, distance = pairs.offsets(_with_oxygen(points).flatten(0, 1))
        stretch = torch.minimum(distance - springs.length, springs.largest)
        force = pairs.forces(springs.weight * stretch / distance, offset).view(-1, _ATOMS, 3)
        gradient = self._by_points @ force
        gradient[1:, _N].add_(gradient[:-1, _O])
        return gradient[:, :_O]

    def _torsion_forces(self, points: Tensor, ramachandran: float) -> Tensor:
        torsions = ChainTorsions.measure(points[:, :_CB].flatten(0, 1))
        angle = torsions.angle.view(-1, 3)  # psi of a residue, omega and phi of the next
        slope = self._amplitude * (angle - self._phase).sin()
        own = self._potential.slopes(phi_and_psi(angle)) * (ramachandran * self._ramachandran)
        slope[:, 2].add_(own[1:, 0])
        slope[:, 0].add_(own[:-1, 1])
        return torsions.forces(slope.flatten()).view(-1, 3, 3)


class _Springs(NamedTuple):
    """Springs between S pairs of atoms, which are numbered residue by residue."""

    first: Tensor  #: ``[S]``
    second: Tensor  #: ``[S]``
    length: Tensor  #: ``[S]`` in Å
    weight: Tensor  #: ``[S]`` per Å², of half the squared stretch
    largest: Tensor  #: ``[S]``: the stretch in Å that counts at most; 0 for pairs that only push


def _peptide_springs(bonded: Tensor, like: Tensor, weights: BackboneWeights) -> _Springs:
    before = _ATOMS * bonded.nonzero()[:, 0]
    terms = zip(_PAIRS, (weights.bond, weights.angle, weights.angle, weights.ca_ca), strict=True)
    ones = like.new_ones(len(before))
    rows = [
        _Springs(before + a, before + _ATOMS + b, length * ones, 2 * weight * ones, torch.inf * ones)
        for (a, b, length), weight in terms
    ]
    return _Springs(*map(torch.cat, zip(*rows, strict=True)))


def _cosines(
    bonded: Tensor, has_torsions: Tensor, has_hand: Tensor, predicted: Tensor, weights: BackboneWeights
) -> tuple[Tensor, Tensor]:
    """Return amplitudes and phases ``[N - 1, 3]`` of the slopes of all cosines, by psi, omega and the next phi.

    Cosines of one angle add to one cosine. The energy is ``amplitude * (1 - cos(angle - phase))`` up to a constant.
    """
    at = torch.polar(weights.predicted * has_torsions.expand_as(predicted).contiguous(), predicted)
    hand = weights.hand * has_torsions[:, 0] * has_hand
    phi = at[:, 0] + torch.polar(hand, torch.full_like(hand, _LEFT_HANDED - math.pi))
    omega = torch.polar(weights.omega * bonded.to(predicted), torch.full_like(hand[1:], math.pi))
    together = torch.stack([at[:-1, 1], omega, phi[1:]], -1)
    return together.abs(), together.angle()


def _with_oxygen(points: Tensor) -> Tensor:
    """Return N, CA, C, CB and O ``[N, 5, 3]``; O of the last residue counts nowhere."""
    c = points[:, _C]
    following = torch.cat([points[1:, _N], points[-1:, _N]])
    oxygen = c.add(c - points[:, _CA], alpha=_OXYGEN_FROM_CA).add_(c - following, alpha=_OXYGEN_FROM_N)
    return torch.cat([points, oxygen[:, None]], 1)


def phi_and_psi(angle: Tensor) -> Tensor:
    """Return phi and psi ``[N, 2]`` from rows ``[N - 1, 3]`` of psi, omega, and phi of the next residue.

    Phi of the first residue and psi of the last are repeated from their neighbour, because they have none.
    """
    return torch.cat([angle[:1, 2], angle[:, 2], angle[:, 0], angle[-1:, 0]]).view(2, -1).mT


def bonds(residue_index: Tensor, present: Tensor) -> Tensor:
    """Return a mask ``[*, N - 1]`` of residues whose next one is their neighbour in a chain.

    Neighbours differ by 1 in ``residue_index [*, N]``, and both are ``present [*, N]``.
    """
    follows = residue_index[..., 1:] - residue_index[..., :-1] == 1
    return follows & present[..., 1:] & present[..., :-1]


class ChainTorsions(NamedTuple):
    """Torsions of each four atoms in a row of A, and their derivatives.

    Blondel and Karplus, J. Comput. Chem. 17, 1996.
    """

    angle: Tensor  #: ``[A - 3]`` in radians
    first: Tensor  #: Derivatives ``[A - 3, 3]`` by the first of the four atoms, in 1/Å
    last: Tensor  #: Derivatives by the last one
    before: (
        Tensor  #: ``[A - 3, 1]``: part of the axis between the middle atoms that the bond before it covers
    )
    after: Tensor  #: ``[A - 3, 1]``: part that the bond after it covers

    @classmethod
    def measure(cls, chain: Tensor) -> ChainTorsions:
        """Measure the torsions along ``chain [A, 3]`` in Å."""
        step = chain[1:] - chain[:-1]
        normal = torch.linalg.cross(step[:-1], step[1:])
        axis = step[1:-1]
        square = axis.square().sum(-1, keepdim=True) + _EPSILON
        along = (step[:-1] * step[1:]).sum(-1, keepdim=True)
        length = square.sqrt()
        normed = normal / (normal.square().sum(-1, keepdim=True) + _EPSILON)
        sine = (step[:-2] * normal[1:]).sum(-1) * length[:, 0]
        return cls(
            angle=torch.atan2(sine, (normal[:-1] * normal[1:]).sum(-1)),
            first=-length * normed[:-1],
            last=length * normed[1:],
            before=along[:-1] / square,
            after=along[1:] / square,
        )

    def forces(self, slope: Tensor) -> Tensor:
        """Return the gradient ``[A, 3]`` of an energy whose derivatives by the angles are ``slope [A - 3]``."""
        first, last = self.first * slope[:, None], self.last * slope[:, None]
        along_first, along_last = self.before * first, self.after * last
        inner = along_last - along_first
        total = first.new_zeros(len(slope) + 3, 3)
        # `+=` of a slice would copy the sum to itself.
        total[:-3].add_(first)
        total[1:-2].add_(inner - first)
        total[2:-1].sub_(inner + last)
        total[3:].add_(last)
        return total
