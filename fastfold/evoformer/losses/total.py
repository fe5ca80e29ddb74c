"""Total AlphaFold loss (supplement, section 1.9, equation 7) of monomers and complexes."""

from __future__ import annotations

from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.losses import heads
from fastfold.evoformer.losses.ca_atoms import ca_losses
from fastfold.evoformer.losses.fape import backbone_fape, complex_backbone_fape, sidechain_fape
from fastfold.evoformer.losses.masked import full_precision, without_masked
from fastfold.evoformer.losses.side_chains import rename_ground_truth, torsion_losses
from fastfold.evoformer.losses.violation import find_violations, violation_loss, violation_metrics

_HEADS = {
    "distogram": heads.distogram_loss,
    "masked_msa": heads.masked_msa_loss,
    "experimentally_resolved": heads.experimentally_resolved_loss,
    "predicted_lddt": heads.predicted_lddt_loss,
}


def structure_loss(structure: dict[str, Any], batch: dict[str, Tensor], config: ConfigDict) -> dict[str, Any]:
    """Compute the loss of the structure module and all its parts, under AlphaFold's names.

    Args:
        structure: Result of the structure module.
        batch: One cycle's features with the labels (``backbone_affine_*``, ``rigidgroups_*``, ``atom14_*``,
            ``chi_*``), leading batch axes ``*``; for a multimer network also ``asym_id``.
        config: Official ``structure_module`` config node; a multimer network's has ``intra_chain_fape``.

    Returns:
        ``loss [*]``, ``fape``, ``sidechain_fape``, ``chi_loss``, ``angle_norm_loss``, the renamed ground truth,
        ``violations`` and ``metrics``. For a multimer network also the terms of ``fape``, ``intra_chain_fape`` and
        ``interface_fape``. Also ``chain_center_of_mass``, ``smooth_lddt`` and ``ca_trace`` if the configuration has
        them.
    """
    positions = structure["final_atom14_positions"]
    terms: dict[str, Any] = dict(rename_ground_truth(positions, batch))
    violations = find_violations(positions, batch, config)
    metrics = violation_metrics(positions, violations, batch)
    if "intra_chain_fape" in config:
        within, between = complex_backbone_fape(structure, batch, config)
        terms |= {"intra_chain_fape": within[-1], "interface_fape": between[-1]}
        backbone = within + between
    else:
        backbone = backbone_fape(structure, batch, config)
    sidechain = sidechain_fape(structure | terms, batch, config)
    angles = torsion_losses(structure, batch)
    share = config.sidechain.weight_frac
    loss = (1.0 - share) * backbone.mean(0) + share * sidechain
    loss = (
        loss + config.chi_weight * angles["chi_loss"] + config.angle_norm_weight * angles["angle_norm_loss"]
    )
    loss = loss + config.structural_violation_loss_weight * violation_loss(
        violations, batch, config.get("violation")
    )
    for name, layers in ca_losses(structure, batch, config).items():
        terms[name] = layers[-1]
        loss = loss + config[name].weight * layers.mean(0)
    terms |= {"violations": violations, "metrics": metrics, "fape": backbone[-1], "sidechain_fape": sidechain}
    return terms | angles | {"loss": loss}


def alphafold_loss(
    result: dict[str, Any], batch: dict[str, Tensor], config: ConfigDict
) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    """Return the weighted sum of all losses of a network, and the parts of each head.

    Losses are computed in the precision of the predicted positions, at least float32. Labels may have another one.
    Masks may be Boolean, and masked labels may have any value.

    The chains of a complex must be in the prediction's order (:mod:`fastfold.evoformer.losses.permutation`).

    Returns:
        The total loss, a scalar averaged over leading batch axes, and a tree with the parts of each head,
        each part ``[*]``.

    Example:
        >>> import fastfold
        >>> import torch
        >>> from fastfold.data.targets import Chain
        >>> from fastfold.data.training.labels import structure_labels
        >>> from fastfold.evoformer.losses import alphafold_loss
        >>> model = fastfold.load_model("mini", device="cpu")
        >>> truth = fastfold.predict("MTYKLILNGK", model, num_recycles=0).protein
        >>> sampler = fastfold.featurize([Chain("A", "MTYKLILNGK")], [([], [])], model.config)
        >>> labels = structure_labels(truth.aatype, truth.atom_positions, truth.atom_mask, resolution=2.0)
        >>> batch = {name: torch.as_tensor(value) for name, value in (sampler.sample(0) | labels).items()}
        >>> result = model({name: value[None] for name, value in batch.items()}, 0)
        >>> loss, parts = alphafold_loss(result, batch, model.config)
        >>> loss.backward()
        >>> sorted(parts)[:2]
        ['distogram', 'experimentally_resolved']
    """
    weights = config.model.heads
    names = ("structure_module", "predicted_aligned_error", *_HEADS)
    result = full_precision({name: result[name] for name in names if name in result})
    batch = without_masked(batch, result["structure_module"]["final_atom14_positions"].dtype)
    with torch.autocast(batch["aatype"].device.type, enabled=False):
        structure = structure_loss(result["structure_module"], batch, weights.structure_module)
        parts: dict[str, dict[str, Any]] = {"structure_module": structure}
        for name, function in _HEADS.items():
            if name in result:
                parts[name] = function(result, batch, weights[name])
        if "predicted_aligned_error" in result:
            parts["predicted_aligned_error"] = heads.predicted_aligned_error_loss(
                result, batch, weights.predicted_aligned_error, weights.structure_module.position_scale
            )
    terms = [weights[name].weight * part["loss"] for name, part in parts.items()]
    return sum(terms[1:], terms[0]).mean(), parts
