"""Smooth lDDT loss: a bounded loss on distances between CA atoms.

FAPE grows with a residue's distance from its true position. An unsure network therefore minimises it by averaging
the possible structures, which come out too compact. In this loss a distance that is wrong by 10 Å is hardly better
than one that is wrong by 20 Å, so the network gains by choosing one of the possible structures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc

_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_EPSILON = 1e-8  #: In Å²; keeps the gradient finite for the diagonal and for two atoms at the same position


def smooth_lddt_loss(positions: Tensor, target: Tensor, mask: Tensor, *, cutoff: float) -> Tensor:
    """Return 1 - lDDT, with sigmoids in place of its thresholds.

    AlphaFold 3, supplement Algorithm 27 (Abramson et al. 2024, doi:10.1038/s41586-024-07487-w), for one kind of atom.

    Args:
        positions: Predicted ``[*, N, 3]`` in Å.
        target: Experimental ``[*, N, 3]`` in Å; leading axes broadcast against those of ``positions``.
        mask: ``[*, N]``, 1 for atoms that the experiment resolved.
        cutoff: Pairs count if they are nearer than this in the experiment, in Å.

    Returns:
        ``[*]``, 0 to 1; 0 if no pair counts.
    """
    true = _distances(target)
    errors = (_distances(positions) - true).abs()
    score = sum((torch.sigmoid(threshold - errors) for threshold in _THRESHOLDS), torch.zeros_like(errors))
    pairs = mask[..., :, None] * mask[..., None, :] * (true < cutoff)
    pairs = pairs - torch.diag_embed(torch.diagonal(pairs, dim1=-2, dim2=-1))
    count = pairs.sum((-2, -1))
    wrong = (pairs * (1.0 - score / len(_THRESHOLDS))).sum((-2, -1))
    return wrong / count.clamp(min=1)


def _distances(points: Tensor) -> Tensor:
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + _EPSILON).sqrt()


def of_structure(structure: dict[str, Any], batch: dict[str, Tensor], config: Any) -> Tensor:
    """Return :func:`smooth_lddt_loss` of the CA atoms after every layer, ``[layers, *]``.

    The structure has ``traj [layers, *, N, 7]``, quaternions and CA positions in Å, the batch ``all_atom_positions``
    and ``all_atom_mask``, and the config node ``smooth_lddt`` the ``cutoff`` in Å.
    """
    ca = rc.atom_order["CA"]
    return smooth_lddt_loss(
        structure["traj"][..., 4:],
        batch["all_atom_positions"][..., ca, :],
        batch["all_atom_mask"][..., ca],
        cutoff=config.cutoff,
    )
