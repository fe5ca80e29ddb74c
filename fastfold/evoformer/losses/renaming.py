"""Ground truth under the atom names that fit the prediction better (supplement Algorithm 26)."""

from __future__ import annotations

import torch
from torch import Tensor


def rename_ground_truth(positions: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Choose between the two namings of symmetric atoms, residue by residue.

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
        reference = (exists * (1.0 - ambiguous)).flatten(-2)[..., None, None, :]
        moving = (exists * ambiguous)[..., None]

        def misfit(points: Tensor) -> Tensor:
            deviation = (_distances(positions) - _distances(points)).square()
            return (moving * reference * (deviation + 1e-10).sqrt()).sum((-2, -1))

        better = (misfit(alternative) < misfit(truth)).to(positions.dtype)
    return {
        "alt_naming_is_better": better,
        "renamed_atom14_gt_positions": torch.lerp(truth, alternative, better[..., None, None]),
        "renamed_atom14_gt_exists": torch.lerp(exists, batch["atom14_alt_gt_exists"], better[..., None]),
    }


def _distances(points: Tensor) -> Tensor:
    """Distances ``[*, N, 14, 14 N]`` from each residue's atoms to all atoms."""
    everywhere = points.flatten(-3, -2)[..., None, None, :, :]
    return ((points[..., None, :] - everywhere).square().sum(-1) + 1e-10).sqrt()
