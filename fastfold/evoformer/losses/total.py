"""The whole AlphaFold loss of a monomer network (supplement, section 1.9, equation 7)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastfold.evoformer.losses import heads
from fastfold.evoformer.losses.fape import backbone_fape, sidechain_fape
from fastfold.evoformer.losses.renaming import rename_ground_truth
from fastfold.evoformer.losses.torsion import torsion_losses
from fastfold.evoformer.losses.violation import find_violations, violation_loss, violation_metrics

_HEADS = {
    "distogram": heads.distogram_loss,
    "masked_msa": heads.masked_msa_loss,
    "experimentally_resolved": heads.experimentally_resolved_loss,
    "predicted_lddt": heads.predicted_lddt_loss,
}


def structure_loss(structure: dict[str, Any], batch: dict[str, Tensor], config: Any) -> dict[str, Any]:
    """Loss of the structure module and all its parts, under AlphaFold's names.

    Args:
        structure: Result of the structure module.
        batch: One cycle's features with the labels (``backbone_affine_*``, ``rigidgroups_*``, ``atom14_*``,
            ``chi_*``), leading batch axes ``*``.
        config: Official ``structure_module`` config node.

    Returns:
        ``loss [*]``, ``fape``, ``sidechain_fape``, ``chi_loss``, ``angle_norm_loss``, the renamed ground truth,
        ``violations`` and ``metrics``.
    """
    positions = structure["final_atom14_positions"]
    found: dict[str, Any] = dict(rename_ground_truth(positions, batch))
    violations = find_violations(positions, batch, config)
    metrics = violation_metrics(positions, violations, batch)
    backbone = backbone_fape(structure, batch, config)
    sidechain = sidechain_fape(structure | found, batch, config)
    angles = torsion_losses(structure, batch)
    share = config.sidechain.weight_frac
    loss = (1.0 - share) * backbone.mean(0) + share * sidechain
    loss = (
        loss + config.chi_weight * angles["chi_loss"] + config.angle_norm_weight * angles["angle_norm_loss"]
    )
    loss = loss + config.structural_violation_loss_weight * violation_loss(violations, batch)
    found |= {"violations": violations, "metrics": metrics, "fape": backbone[-1], "sidechain_fape": sidechain}
    return found | angles | {"loss": loss}


def alphafold_loss(
    result: dict[str, Any], batch: dict[str, Tensor], config: Any
) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    """Weighted sum of all losses of a monomer network.

    Args:
        result: What :class:`fastfold.evoformer.model.AlphaFold` returned.
        batch: The last cycle's features together with the labels.
        config: Official configuration tree.

    Returns:
        The total loss, a scalar averaged over leading batch axes, and a tree with the parts of each head,
        each part ``[*]``.
    """
    weights = config.model.heads
    parts: dict[str, dict[str, Any]] = {
        "structure_module": structure_loss(result["structure_module"], batch, weights.structure_module)
    }
    for name, function in _HEADS.items():
        if name in result:
            parts[name] = function(result, batch, weights[name])
    if "predicted_aligned_error" in result:
        parts["predicted_aligned_error"] = heads.predicted_aligned_error_loss(
            result, batch, weights.predicted_aligned_error, weights.structure_module.position_scale
        )
    terms = [weights[name].weight * part["loss"] for name, part in parts.items()]
    return sum(terms[1:], terms[0]).mean(), parts
