"""Chain center-of-mass loss: penalises chains of a complex that are nearer than in the experiment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc

_EPSILON = 1e-8
"""In Å²; keeps the gradient finite for two centers at the same position, as in an untrained network's structures."""


def chain_center_of_mass_loss(
    positions: Tensor, target: Tensor, mask: Tensor, asym_id: Tensor, config: Any
) -> Tensor:
    """Return the mean over pairs of chains of ``min(1/20 (d_predicted - d_true + 4 Å), 0)²``.

    AlphaFold-Multimer, section 2.5, equation 1 (Evans et al. 2021, doi:10.1101/2021.10.04.463034). ``d`` is the
    distance between the centers of mass of two chains' CA atoms, counting atoms that the experiment resolved.

    Args:
        positions: Predicted CA positions ``[*, N, 3]`` in Å.
        target: Experimental CA positions ``[*, N, 3]`` in Å.
        mask: ``[*, N]``, 1 for CA atoms that the experiment resolved.
        asym_id: Chain of each residue ``[*, N]``.
        config: Has ``tolerance`` (4 Å: chains may be nearer by this much) and ``length_scale`` (20 Å).

    Returns:
        ``[*]``; zero for fewer than two chains.
    """
    chains = torch.unique(asym_id)
    member = (asym_id[..., None, :] == chains[:, None]) * mask[..., None, :]  # [*, C, N]
    counts = member.sum(-1)
    # [*, C, C]
    predicted, true = (_distances(member @ x / counts.clamp(min=1)[..., None]) for x in (positions, target))
    exists = (counts > 0).to(positions.dtype)
    pairs = (exists[..., :, None] * exists[..., None, :]).triu(1)
    errors = ((predicted - true + config.tolerance) / config.length_scale).clamp(max=0).square()
    return (pairs * errors).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1)


def _distances(points: Tensor) -> Tensor:
    """Return distances ``[*, C, C]`` between points ``[*, C, 3]``; coincident points have a gradient of zero."""
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + _EPSILON).sqrt()


def of_structure(structure: dict[str, Any], batch: dict[str, Tensor], config: Any) -> Tensor:
    """Return :func:`chain_center_of_mass_loss` ``[*]`` of the structure module's result.

    The structure has ``final_atom_positions [*, N, 37, 3]`` in Å, the batch ``all_atom_positions``, ``all_atom_mask``
    and ``asym_id``.
    """
    ca = rc.atom_order["CA"]
    return chain_center_of_mass_loss(
        structure["final_atom_positions"][..., ca, :],
        batch["all_atom_positions"][..., ca, :],
        batch["all_atom_mask"][..., ca],
        batch["asym_id"],
        config,
    )
