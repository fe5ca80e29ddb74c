"""Losses on side-chain torsion angles (supplement Algorithm 27)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.evoformer.losses.masked import masked_mean
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
