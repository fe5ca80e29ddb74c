"""Apply the settings of a fold to a network's configuration."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from fastfold.errors import ConfigError
from fastfold.evoformer.config import descent_settings, ensemble_size, is_multimer
from fastfold.inference.config import InferConfig


def apply_settings(config: InferConfig, network: Any) -> Any:
    """Return a copy of a network's official configuration tree with the settings of a fold, or raise ConfigError."""
    tree = network.copy_and_resolve_references()
    model, multimer = tree.model, is_multimer(tree)
    if config.num_recycles is not None:
        model.num_recycle = config.num_recycles
    if config.recycle_tolerance is not None:
        model.recycle_early_stop_tolerance = config.recycle_tolerance
    if config.num_ensemble is not None:
        if multimer:
            model.num_ensemble_eval = config.num_ensemble
        else:
            tree.data.eval.num_ensemble = config.num_ensemble
    if config.max_msa is not None:
        _set_rows(tree, *config.max_msa)
    if multimer and not config.use_cluster_profile:
        model.embeddings_and_evoformer.use_cluster_profile = False
    if config.restraint_springs:
        model.heads.structure_module.distogram_descent = descent_settings(tree, is_needed=True)
    return tree


def _set_rows(network: Any, clusters: int, extra: int) -> None:
    if is_multimer(network):
        trunk = network.model.embeddings_and_evoformer
        trunk.num_msa, trunk.num_extra_msa = clusters, extra
        return
    data = network.data
    least = 1 + (data.eval.max_templates if data.common.reduce_msa_clusters_by_max_templates else 0)
    if clusters < least:
        raise ConfigError(
            f"`max_msa={clusters}:{extra}` leaves no row for the sequence: {least - 1} of the rows are templates; give "
            f"at least {least}:{extra}"
        )
    data.eval.max_msa_clusters, data.common.max_extra_msa = clusters, extra


def max_rows(config: ConfigDict) -> tuple[int, int]:
    """Return the largest numbers of rows of the MSA and of the extra MSA of a network."""
    if is_multimer(config):
        trunk = config.model.embeddings_and_evoformer
        return int(trunk.num_msa), int(trunk.num_extra_msa)
    return int(config.data.eval.max_msa_clusters), int(config.data.common.max_extra_msa)


def recycle_tolerance(network: Any) -> float:
    """Return the change of CA distances in Å below which recycling stops; 0 for no early stop."""
    return max(0.0, float(network.model.get("recycle_early_stop_tolerance", 0.0)))


def numeric_settings(config: InferConfig, network: Any) -> dict[str, Any]:
    """Return the effective settings that determine a network's results, in JSON's types."""
    applied = apply_settings(config, network)
    no_profile = is_multimer(applied) and not config.use_cluster_profile
    restraints = {}
    if config.restraints is not None:
        restraints = {
            "restraints": config.restraints.name,
            "restraint_steps": config.restraint_steps,
            "restraint_leave_one_out": config.restraint_leave_one_out,
            **({"restraint_springs": True} if config.restraint_springs else {}),
        }
    return {
        "num_recycles": applied.model.num_recycle,
        "recycle_tolerance": recycle_tolerance(applied),
        "num_ensemble": ensemble_size(applied),
        "max_msa": list(max_rows(applied)),
        **({"use_cluster_profile": False} if no_profile else {}),
        "precision": config.precision,
        "dropout": config.dropout,
        "cyclic": config.ring_names,
        "initial_guess": None if config.initial_guess is None else config.initial_guess.name,
        **restraints,
    }
