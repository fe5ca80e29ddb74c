"""Losses of the prediction heads (supplement, sections 1.9.6 to 1.9.10)."""

from __future__ import annotations

from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.losses.fape import aligned_errors
from fastfold.evoformer.losses.masked import (
    binary_cross_entropy,
    cross_entropy,
    masked_mean,
    within_resolution,
)
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import lddt

Batch = dict[str, Tensor]


def distogram_loss(result: dict[str, Any], batch: Batch, config: ConfigDict) -> dict[str, Tensor]:
    """Compute the cross entropy ``loss [*]`` of binned CB distances, and ``true_dist [*, N, N]`` in Å.

    Supplement, section 1.9.8.
    """
    head = result["distogram"]
    beta, mask = batch["pseudo_beta"], batch["pseudo_beta_mask"]
    squared = (beta[..., :, None, :] - beta[..., None, :, :]).square().sum(-1)
    # As in the official program, an edge belongs to the bin below it.
    bins = torch.bucketize(squared, head["bin_edges"].to(squared.dtype).square())
    pair_mask = mask[..., :, None] * mask[..., None, :]
    loss = masked_mean(pair_mask, cross_entropy(head["logits"], bins, head.get("rows")), 2, eps=1e-6)
    return {"loss": loss, "true_dist": (squared + 1e-6).sqrt()}


def masked_msa_loss(result: dict[str, Any], batch: Batch, config: ConfigDict) -> dict[str, Tensor]:
    """Compute the cross entropy ``[*]`` of residue types at masked MSA positions (section 1.9.9)."""
    head = result["masked_msa"]
    errors = cross_entropy(head["logits"], batch["true_msa"], head.get("rows"))
    return {"loss": masked_mean(batch["bert_mask"], errors, 2, eps=1e-8)}


def experimentally_resolved_loss(
    result: dict[str, Any], batch: Batch, config: ConfigDict
) -> dict[str, Tensor]:
    """Compute the binary cross entropy ``[*]`` of the experiment's resolved atoms (section 1.9.10)."""
    errors = binary_cross_entropy(result["experimentally_resolved"]["logits"], batch["all_atom_mask"])
    loss = masked_mean(batch["atom37_atom_exists"], errors, 2, eps=1e-8)
    return {"loss": loss * within_resolution(batch["resolution"], config)}


def predicted_lddt_loss(result: dict[str, Any], batch: Batch, config: ConfigDict) -> dict[str, Tensor]:
    """Compute the cross entropy ``[*]`` of the prediction's binned lDDT-CA (section 1.9.6)."""
    logits = result["predicted_lddt"]["logits"]
    ca = rc.atom_order["CA"]
    mask = batch["all_atom_mask"][..., ca]
    with torch.no_grad():
        predicted = result["structure_module"]["final_atom_positions"][..., ca, :]
        score = lddt(predicted, batch["all_atom_positions"][..., ca, :], mask)
        bins = (score * config.num_bins).floor().long().clamp(max=config.num_bins - 1)
    loss = masked_mean(mask, cross_entropy(logits, bins), 1, eps=1e-8)
    return {"loss": loss * within_resolution(batch["resolution"], config)}


def predicted_aligned_error_loss(
    result: dict[str, Any], batch: Batch, config: ConfigDict, position_scale: float
) -> dict[str, Tensor]:
    """Compute the cross entropy ``[*]`` of the prediction's binned aligned errors (section 1.9.7).

    ``position_scale`` is the structure module's length unit in Å.
    """
    head = result["predicted_aligned_error"]
    errors = aligned_errors(result["structure_module"], batch, position_scale)
    bins = torch.bucketize(errors, head["breaks"].to(errors.dtype).square())
    mask = batch["backbone_affine_mask"]
    pair_mask = mask[..., :, None] * mask[..., None, :]
    loss = masked_mean(pair_mask, cross_entropy(head["logits"], bins, head.get("rows")), 2, eps=1e-8)
    return {"loss": loss * within_resolution(batch["resolution"], config)}
