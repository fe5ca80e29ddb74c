"""Last stage of the descent on the distogram: a fold gets the backbone of a protein at the same distances.

Distances of CB atoms fix neither the hand of a chain nor its peptide planes. So windows with the wrong hand are
mirrored, peptide planes are placed by dynamic programming, and rigid residues descend on the distances together with
the energy of a backbone, first with weak bonds and strong torsions, then with strong bonds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastfold.evoformer.structure.backbone_energy import (
    BackboneEnergy,
    BackboneWeights,
    ChainTorsions,
    bonds,
    phi_and_psi,
)
from fastfold.evoformer.structure.distogram_potential import Distances
from fastfold.evoformer.structure.mirrored_windows import mirror_windows
from fastfold.evoformer.structure.peptide_planes import PlaneWeights, peptide_planes
from fastfold.evoformer.structure.ramachandran import RamachandranPotential
from fastfold.evoformer.structure.restraint_springs import RestraintSprings
from fastfold.evoformer.structure.rigid_points import arms, placed, rotations, torques
from fastfold.protein import residue_constants as rc
from fastfold.protein.rigid import update_quaternion


class Phase(NamedTuple):
    """Part of the descent with weights of its own."""

    share: float  #: Of the steps
    rate: float  #: Move of a residue in the first step in Å
    distances: float  #: Factor of the potential of distances
    restraints: float  #: Factor of the springs between restrained residues
    weights: BackboneWeights


SOFT = Phase(
    share=0.25,
    rate=0.1,
    distances=1.0,
    restraints=1.0,
    weights=BackboneWeights(
        bond=200.0,
        angle=150.0,
        ca_ca=100.0,
        omega=100.0,
        ramachandran=80.0,
        hand=110.0,
        predicted=20.0,
        overlap=30.0,
    ),
)
HARD = Phase(
    share=0.5,
    rate=0.1,
    distances=1.6,
    restraints=1.6,
    weights=BackboneWeights(
        bond=2500.0,
        angle=1000.0,
        ca_ca=1500.0,
        omega=2400.0,
        ramachandran=120.0,
        hand=140.0,
        predicted=20.0,
        overlap=80.0,
    ),
)
STIFF = Phase(
    share=0.25,
    rate=0.05,
    distances=1.6,
    restraints=0.3,
    weights=BackboneWeights(
        bond=30000.0,
        angle=5000.0,
        ca_ca=3000.0,
        omega=10500.0,
        ramachandran=120.0,
        hand=140.0,
        predicted=15.0,
        overlap=240.0,
    ),
)
RESTRAINED_HARD = HARD._replace(weights=HARD.weights._replace(ca_ca=2500.0, ramachandran=180.0))
RESTRAINED_STIFF = STIFF._replace(weights=STIFF.weights._replace(ca_ca=6000.0, ramachandran=180.0))
"""Phases while springs between restrained residues strain the backbone."""
_FREE = PlaneWeights(beta=0.0, predicted=1.0)  #: For planes of a trace whose frames have the wrong hand
_NEAR = PlaneWeights(beta=1.0, predicted=1.0)  #: For planes that keep the directions of CB
_CA, _CB = 1, 3
RADIUS_WEIGHT = 800.0  #: Of half the squared deviation of the radius of gyration, per Å² and residue
_LEAST_RADIUS = 1e-3  #: In Å; keeps directions finite where all residues coincide
_LAST_RATE = 0.02  #: Move of a residue in the last step of a phase over that in the first
_TURN = 0.25  #: Turn of a residue over its move, in 1/Å
_MEAN, _SQUARE = 0.9, 0.98  #: Decay of the averages of gradients and of their squares (Adam)
_KEEP_FORCES = 3  #: Steps with the same forces of distances, which change slowly and take the most time
_RELIST = 15  #: Steps between lists of near atoms
_RAMACHANDRAN_START = 0.3  #: Factor of the Ramachandran term in the first step; it is 1 from the middle on


def build_backbone(
    affines: Tensor,
    distances: Distances,
    *,
    aatype: Tensor,
    residue_index: Tensor,
    present: Tensor,
    predicted: Tensor,
    steps: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
    restraints: RestraintSprings | None = None,
) -> Tensor:
    """Give frames near others the backbone of a protein, without recording gradients.

    Args:
        affines: Quaternions and CA positions in Å, ``[N, 7]``.
        distances: Potential of the CB distances of this process' pairs.
        aatype: ``[N]``.
        residue_index: ``[N]``; neighbours in a chain differ by 1.
        present: ``[N]``, False for padding, which does not move.
        predicted: Phi and psi ``[N, 2]`` of the network, in radians.
        steps: Steps of all phases together.
        sum_over_ranks: Sums a tensor over the processes that hold other pairs.
        restraints: Springs between restrained residues; None for none.

    Returns:
        Frames ``[N, 7]``.
    """
    bonded = bonds(residue_index, present)
    if not bool(bonded.any()):
        return affines
    potential = RamachandranPotential(aatype, bonded, affines)
    is_glycine = aatype == rc.restype_order["G"]
    shape = backbone_points(aatype, affines)
    radius = RadiusSpring(affines[:, 4:], present)

    def planes(frames: Tensor, weights: PlaneWeights) -> Tensor:
        return peptide_planes(frames, bonded, potential, predicted, is_glycine, weights)

    def descended(frames: Tensor, phase: Phase) -> Tensor:
        energy = BackboneEnergy(
            aatype, residue_index, present, potential=potential, predicted=predicted, weights=phase.weights
        )
        own_steps = round(phase.share * steps)

        def pull(points: Tensor) -> Tensor:
            own = torch.zeros_like(points)
            own[:, _CB] = phase.distances * sum_over_ranks(distances.forces(points[:, _CB]))
            if restraints is not None:
                own += phase.restraints * restraints.forces(points.flatten(0, 1)).view_as(points)
            return own

        return _descend(frames, own_steps, phase.rate, energy=energy, pull=pull, radius=radius, shape=shape)

    frames = planes(affines, _NEAR)
    wrong = _has_wrong_hand(frames, shape, bonded) & ~is_glycine
    frames = torch.cat([frames[:, :4], mirror_windows(frames[:, 4:], wrong, bonded)], -1)
    frames = descended(planes(frames, _FREE), SOFT)
    pulls = restraints is not None and bool(restraints.total(placed(frames, shape).flatten(0, 1)) > 0)
    hard, stiff = (RESTRAINED_HARD, RESTRAINED_STIFF) if pulls else (HARD, STIFF)
    frames = descended(planes(frames, _NEAR), hard)
    frames = descended(frames, stiff)
    return torch.where(present[:, None], frames, affines)


def backbone_points(aatype: Tensor, like: Tensor) -> Tensor:
    """Return N, CA, C and CB of each residue in its frame, ``[N, 4, 3]`` in Å, by ``aatype [N]``.

    Glycine's CB is its CA; unknown residues are as alanine. Dtype and device are those of ``like``.
    """
    table = torch.as_tensor(rc.restype_atom14_rigid_group_positions).to(like)[:, [0, 1, 2, 4]]
    table[rc.unk_restype_index] = table[rc.restype_order["A"]]
    table[rc.restype_order["G"], _CB] = 0.0
    return table[aatype.long().clamp(max=rc.unk_restype_index)]


def _has_wrong_hand(affines: Tensor, shape: Tensor, bonded: Tensor) -> Tensor:
    """Return a mask ``[N]`` of residues between two others whose phi is above 0."""
    chain = placed(affines, shape)[:, :_CB].flatten(0, 1)
    phi = phi_and_psi(ChainTorsions.measure(chain).angle.view(-1, 3))[:, 0]
    return (phi > 0) & pad(bonded[1:] & bonded[:-1], (1, 1))


class RadiusSpring:
    """Spring that keeps the radius of gyration, which grows with the distances of CA neighbours otherwise."""

    def __init__(self, center: Tensor, present: Tensor) -> None:
        """Keep the radius of ``center [N, 3]`` in Å, without padding where ``present [N]`` is False."""
        self._share = present.to(center) / present.sum()
        self._radius = self._spread(center)[1]

    def forces(self, center: Tensor) -> Tensor:
        """Return the gradient ``[N, 3]`` of the energy ``N * weight / 2 * (radius - start)²``."""
        arm, radius = self._spread(center)
        return RADIUS_WEIGHT * (radius - self._radius) / radius * arm

    def _spread(self, center: Tensor) -> tuple[Tensor, Tensor]:
        arm = center - (self._share[:, None] * center).sum(0)
        square = (self._share * arm.square().sum(-1)).sum()
        return arm, (square + _LEAST_RADIUS**2).sqrt()


def _descend(
    affines: Tensor,
    steps: int,
    rate: float,
    *,
    energy: BackboneEnergy,
    pull: Callable[[Tensor], Tensor],
    radius: RadiusSpring,
    shape: Tensor,
) -> Tensor:
    """Move and turn residues by Adam, with one second moment for each move and one for each turn."""
    quaternion, center = affines[:, :4], affines[:, 4:]
    mean = center.new_zeros(2, len(center), 3)
    square = center.new_zeros(2, len(center), 1)
    size = center.new_tensor([1.0, _TURN])[:, None, None]
    far = torch.zeros_like(shape)
    for step in range(steps):
        done = step / steps
        length = rate * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))
        rotation = rotations(quaternion)
        arm = arms(rotation, shape)
        points = arm + center[:, None]
        if step % _RELIST == 0:
            energy.list_overlaps(points)
        ramachandran = min(1.0, _RAMACHANDRAN_START + 2 * (1 - _RAMACHANDRAN_START) * done)
        gradient = energy.gradient(points, ramachandran)
        if step % _KEEP_FORCES == 0:
            far = pull(points)
            far[:, _CA].add_(radius.forces(center))  # the origin of the frame, so it turns nothing
        gradient += far
        both = torch.stack([gradient.sum(1), torques(rotation, arm, gradient)])
        mean = torch.lerp(both, mean, _MEAN)
        square = torch.lerp(both.square().sum(-1, keepdim=True), square, _SQUARE)
        size_now = (square / (1 - _SQUARE ** (step + 1))).sqrt_().add_(1e-3)
        move, turn = (length / (1 - _MEAN ** (step + 1)) * size * mean / size_now).unbind(0)
        center = center - move
        quaternion = update_quaternion(quaternion, -turn)
    return torch.cat([quaternion, center], -1)
