"""Losses of CA atoms that a configuration may add: smooth lDDT, CA trace, and centers of mass of chains.

Predicted ``positions`` and those of the experiment, ``target``, are ``[*, N, 3]`` in Å; leading axes broadcast. The
``mask [*, N]`` is 1 for atoms that the experiment resolved.
"""

from __future__ import annotations

from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.protein import residue_constants as rc

_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_BOND = 3.8  #: CA-CA distance of neighbours in a chain with trans peptide bonds, in Å
_BONDED = 2  #: Residues at most this far apart in the chain do not count as overlaps


def ca_losses(structure: dict[str, Any], batch: dict[str, Tensor], config: ConfigDict) -> dict[str, Tensor]:
    """Compute the losses ``[layers, *]`` that a configuration has, by the names of their nodes.

    Args:
        structure: ``final_atom_positions [*, N, 37, 3]``, and ``traj [layers, *, N, 7]``, quaternions and CA positions
            after every layer, in Å.
        batch: ``all_atom_positions``, ``all_atom_mask``, ``residue_index``, and for a complex ``asym_id``.
        config: Node with the arguments of ``chain_center_of_mass`` (of the last layer only), ``smooth_lddt`` and
            ``ca_trace``, all optional; the last one has the weights of its terms.
    """
    ca = rc.atom_order["CA"]
    true, mask = batch["all_atom_positions"][..., ca, :], batch["all_atom_mask"][..., ca]
    losses = {}
    if "chain_center_of_mass" in config:
        last, node = structure["final_atom_positions"][..., ca, :], config.chain_center_of_mass
        losses["chain_center_of_mass"] = chain_center_of_mass_loss(
            last, true, mask, asym_id=batch["asym_id"], config=node
        )[None]
    if "smooth_lddt" in config:
        layers = structure["traj"][..., 4:]
        losses["smooth_lddt"] = smooth_lddt_loss(layers, true, mask, cutoff=config.smooth_lddt.cutoff)
    if "ca_trace" in config:
        layers, node = structure["traj"][..., 4:], config.ca_trace
        terms = ca_trace_losses(
            layers, true, mask, residue_index=batch["residue_index"], overlap_distance=node.overlap_distance
        )
        losses["ca_trace"] = (
            node.overlap * terms["overlap"] + node.bond * terms["bond"] + node.radius * terms["radius"]
        )
    return losses


def smooth_lddt_loss(positions: Tensor, target: Tensor, mask: Tensor, *, cutoff: float) -> Tensor:
    """Return 1 - lDDT, with sigmoids in place of its thresholds.

    FAPE grows with a residue's distance from its true position. An unsure network therefore minimises it by averaging
    the possible structures, which come out too compact. In this loss a distance that is wrong by 10 Å is hardly better
    than one that is wrong by 20 Å, so the network gains by choosing one of the possible structures.

    AlphaFold 3, supplement Algorithm 27 (Abramson et al. 2024, doi:10.1038/s41586-024-07487-w), for one kind of atom.

    Pairs count if they are nearer than ``cutoff`` in the experiment, in Å. The loss ``[*]`` is 0 to 1; 0 if no pair
    counts.
    """
    true = _distances(target, 1e-8)
    errors = (_distances(positions, 1e-8) - true).abs()
    score = sum((torch.sigmoid(threshold - errors) for threshold in _THRESHOLDS), torch.zeros_like(errors))
    pairs = mask[..., :, None] * mask[..., None, :] * (true < cutoff)
    pairs = pairs - torch.diag_embed(torch.diagonal(pairs, dim1=-2, dim2=-1))
    count = pairs.sum((-2, -1))
    wrong = (pairs * (1.0 - score / len(_THRESHOLDS))).sum((-2, -1))
    return wrong / count.clamp(min=1)


def ca_trace_losses(
    positions: Tensor, target: Tensor, mask: Tensor, residue_index: Tensor, *, overlap_distance: float
) -> dict[str, Tensor]:
    """Compute the overlap, bond and radius terms of CA traces, which smooth lDDT does not penalise.

    Smooth lDDT counts pairs that are near in the experiment, so a false contact costs nothing and a collapsed structure
    can score well. FAPE is clamped. These three terms penalise collapsed structures after every layer.

    - ``overlap``: mean over residues of the sum over pairs, more than two residues apart in the chain, of
      ``max(overlap_distance - d, 0)²``, in Å².
    - ``bond``: mean over neighbours in the chain of ``(d - 3.8 Å)²``, linear for errors above 1 Å.
    - ``radius``: ``log(R_predicted / R_true)²`` of the radii of gyration.

    Numbers of neighbours in ``residue_index [*, N]`` differ by 1. A pair overlaps below ``overlap_distance`` in Å. The
    terms are ``[*]``, zero if no residue or pair counts.
    """
    count = mask.sum(-1).clamp(min=1)
    distances = _distances(positions, 1e-6)
    apart = (residue_index[..., :, None] - residue_index[..., None, :]).abs()
    pairs = mask[..., :, None] * mask[..., None, :]
    overlaps = pairs * (apart > _BONDED) * torch.relu(overlap_distance - distances).square()
    bonds = torch.diagonal(pairs * (apart == 1), 1, -2, -1)
    errors = torch.diagonal(distances, 1, -2, -1) - _BOND
    lengths = 2 * torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    return {
        "overlap": overlaps.sum((-2, -1)) / count,
        "bond": (bonds * lengths).sum(-1) / bonds.sum(-1).clamp(min=1),
        "radius": (_log_square_radius(positions, mask) - _log_square_radius(target, mask)).square() / 4,
    }


def chain_center_of_mass_loss(
    positions: Tensor, target: Tensor, mask: Tensor, asym_id: Tensor, config: ConfigDict
) -> Tensor:
    """Return the mean over pairs of chains of ``min(1/20 (d_predicted - d_true + 4 Å), 0)²``.

    It penalises chains of a complex that are nearer than in the experiment.

    AlphaFold-Multimer, section 2.5, equation 1 (Evans et al. 2021, doi:10.1101/2021.10.04.463034). ``d`` is the
    distance between the centers of mass of two chains' CA atoms, counting atoms that the experiment resolved.

    ``asym_id [*, N]`` is the chain of each residue. The configuration has ``tolerance`` (4 Å: chains may be nearer by
    this much) and ``length_scale`` (20 Å). The loss ``[*]`` is zero for fewer than two chains.
    """
    chains = torch.unique(asym_id)
    member = (asym_id[..., None, :] == chains[:, None]) * mask[..., None, :]  # [*, C, N]
    counts = member.sum(-1)
    # [*, C, C]
    predicted, true = (
        _distances(member @ x / counts.clamp(min=1)[..., None], 1e-8) for x in (positions, target)
    )
    exists = (counts > 0).to(positions.dtype)
    pairs = (exists[..., :, None] * exists[..., None, :]).triu(1)
    errors = ((predicted - true + config.tolerance) / config.length_scale).clamp(max=0).square()
    return (pairs * errors).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1)


def _distances(points: Tensor, epsilon: float) -> Tensor:
    """Return distances ``[*, N, N]``; ``epsilon`` in Å² keeps the gradient finite for points at the same position."""
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + epsilon).sqrt()


def _log_square_radius(points: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum(-1).clamp(min=1)
    center = (points * mask[..., None]).sum(-2, keepdim=True) / count[..., None, None]
    return (((points - center).square().sum(-1) * mask).sum(-1) / count + 1e-6).log()
