"""Side chains: losses on torsion angles (supplement Algorithm 27), and renaming of symmetric atoms (Algorithm 26)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.evoformer.losses.masked import masked_mean, used_indices
from fastfold.protein.all_atom import lookup


def torsion_losses(structure: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute ``chi_loss`` and ``angle_norm_loss``, both ``[*]``, averaged over the structure module's layers.

    The batch has ``chi_angles [*, N, 4]`` in radians, ``chi_mask [*, N, 4]``, ``seq_mask [*, N]`` and ``aatype``.
    """
    predicted = structure["sidechains"]["angles_sin_cos"][..., 3:, :]
    chi = batch["chi_angles"]
    true = torch.stack([chi.sin(), chi.cos()], -1)
    periodic = lookup("chi_pi_periodic", batch["aatype"], true)[..., None]
    error = (true - predicted).square().sum(-1)
    shifted = ((1.0 - 2.0 * periodic) * true - predicted).square().sum(-1)
    chi_mask = batch["chi_mask"][..., None, :, :]
    chi_loss = masked_mean(chi_mask, _layers_last(torch.minimum(error, shifted), 2), 3)
    raw = structure["sidechains"]["unnormalized_angles_sin_cos"]
    deviation = ((raw.square().sum(-1) + 1e-6).sqrt() - 1.0).abs()
    seq_mask = batch["seq_mask"][..., None, :, None]
    angle_norm_loss = masked_mean(seq_mask, _layers_last(deviation, 2), 3)
    return {"chi_loss": chi_loss, "angle_norm_loss": angle_norm_loss}


def _layers_last(x: Tensor, trailing: int) -> Tensor:
    """Move the layer axis from the front to just before the last ``trailing`` axes."""
    return x.movedim(0, -trailing - 1)


def rename_ground_truth(positions: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename symmetric ground truth atoms, residue by residue, to fit the prediction better.

    Args:
        positions: Predicted atom14 positions ``[*, N, 14, 3]`` in Å.
        batch: AlphaFold's ``atom14_gt_*``, ``atom14_alt_gt_*`` and ``atom14_atom_is_ambiguous``.

    Returns:
        ``alt_naming_is_better [*, N]``, ``renamed_atom14_gt_positions [*, N, 14, 3]`` and
        ``renamed_atom14_gt_exists [*, N, 14]``.
    """
    truth, alternative = batch["atom14_gt_positions"], batch["atom14_alt_gt_positions"]
    exists, ambiguous = batch["atom14_gt_exists"], batch["atom14_atom_is_ambiguous"]
    with torch.no_grad():
        better = _better(positions, truth, alternative, exists * ambiguous, exists * (1.0 - ambiguous))
    return {
        "alt_naming_is_better": better,
        "renamed_atom14_gt_positions": torch.lerp(truth, alternative, better[..., None, None]),
        "renamed_atom14_gt_exists": torch.lerp(exists, batch["atom14_alt_gt_exists"], better[..., None]),
    }


def _better(predicted: Tensor, truth: Tensor, alternative: Tensor, moving: Tensor, fixed: Tensor) -> Tensor:
    """Return 1 for residues ``[*, N]`` that fit better under the alternative names.

    The fit compares distances between ``moving`` and ``fixed`` atoms, masks ``[*, N, 14]``.
    """
    moving, fixed = moving.flatten(-2), fixed.flatten(-2)
    # Few atoms move, so computing only distances from moving to fixed atoms saves memory.
    rows, columns = used_indices(moving), used_indices(fixed)

    def distances(points: Tensor) -> Tensor:
        points = points.flatten(-3, -2)
        delta = points[..., rows, None, :] - points[..., None, columns, :]
        return (delta.square().sum(-1) + 1e-10).sqrt()

    of_prediction = distances(predicted)
    weight = moving[..., rows, None] * fixed[..., None, columns]

    def misfit(points: Tensor) -> Tensor:
        return (weight * ((of_prediction - distances(points)).square() + 1e-10).sqrt()).sum(-1)

    gain = misfit(truth) - misfit(alternative)
    residues = torch.arange(moving.shape[-1], device=moving.device)[rows] // 14
    of_residue = torch.zeros_like(predicted[..., 0, 0]).index_add(-1, residues, gain)
    return (of_residue > 0).to(predicted.dtype)
