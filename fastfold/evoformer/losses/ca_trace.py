"""CA trace loss: overlaps, bond lengths and the radius of gyration, which smooth lDDT does not penalise.

Smooth lDDT counts pairs that are near in the experiment, so a false contact costs nothing and a collapsed structure
can score well. FAPE is clamped. These three terms penalise collapsed structures after every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc

_EPSILON = 1e-6  #: In Å²; keeps the gradient finite for two atoms at the same position
_BOND = 3.8  #: CA-CA distance of neighbours in a chain with trans peptide bonds, in Å
_BONDED = 2  #: Residues at most this far apart in the chain do not count as overlaps


def ca_trace_losses(
    positions: Tensor, target: Tensor, mask: Tensor, residue_index: Tensor, *, overlap_distance: float
) -> dict[str, Tensor]:
    """Compute the overlap, bond and radius terms of CA traces.

    - ``overlap``: mean over residues of the sum over pairs, more than two residues apart in the chain, of
      ``max(overlap_distance - d, 0)²``, in Å².
    - ``bond``: mean over neighbours in the chain of ``(d - 3.8 Å)²``, linear for errors above 1 Å.
    - ``radius``: ``log(R_predicted / R_true)²`` of the radii of gyration.

    Args:
        positions: Predicted ``[*, N, 3]`` in Å.
        target: Experimental ``[*, N, 3]`` in Å; leading axes broadcast against those of ``positions``.
        mask: ``[*, N]``, 1 for atoms that the experiment resolved.
        residue_index: Numbers of the residues ``[*, N]``; neighbours differ by 1.
        overlap_distance: Distance below which a pair overlaps, in Å.

    Returns:
        The terms by name, each ``[*]``; zero if no residue or pair counts.
    """
    count = mask.sum(-1).clamp(min=1)
    distances = ((positions[..., :, None, :] - positions[..., None, :, :]).square().sum(-1) + _EPSILON).sqrt()
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


def _log_square_radius(points: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum(-1).clamp(min=1)
    centre = (points * mask[..., None]).sum(-2, keepdim=True) / count[..., None, None]
    return (((points - centre).square().sum(-1) * mask).sum(-1) / count + _EPSILON).log()


def of_structure(structure: dict[str, Any], batch: dict[str, Tensor], config: Any) -> Tensor:
    """Return the weighted sum of :func:`ca_trace_losses` after every layer, ``[layers, *]``.

    The structure has ``traj [layers, *, N, 7]``, quaternions and CA positions in Å, the batch ``all_atom_positions``,
    ``all_atom_mask`` and ``residue_index``, and the config node ``ca_trace`` the arguments and weights.
    """
    ca = rc.atom_order["CA"]
    terms = ca_trace_losses(
        structure["traj"][..., 4:],
        batch["all_atom_positions"][..., ca, :],
        batch["all_atom_mask"][..., ca],
        batch["residue_index"],
        overlap_distance=config.overlap_distance,
    )
    return config.overlap * terms["overlap"] + config.bond * terms["bond"] + config.radius * terms["radius"]
