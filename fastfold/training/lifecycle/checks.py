"""Settings of a run that exclude each other, refused before any data are read."""

from __future__ import annotations

from ml_collections import ConfigDict

from fastfold.errors import ConfigError
from fastfold.training.config import TrainConfig


def check_settings(config: TrainConfig, tree: ConfigDict) -> None:
    """Check that the settings of a run go together.

    Raises:
        ConfigError: Two settings exclude each other; names them and what to set.
    """
    _check_weights(config)
    _check_cluster_rows(tree)


def _check_weights(config: TrainConfig) -> None:
    """Check that weights are given where random ones would be trained by mistake."""
    finetune = config.finetune
    if config.model.weights is None and (finetune.from_weights or finetune.lora_rank):
        remedy = "" if finetune.lora_rank else ", or finetune.from_weights=false to begin with random ones"
        raise ConfigError(f"expected weights to fine-tune, found none: give model.weights=FILE{remedy}")
    if finetune.lora_rank and config.optim.name == "muon":
        raise ConfigError("finetune=lora trains adapters, which muon does not step: set optim=finetune")


def _check_cluster_rows(tree: ConfigDict) -> None:
    """Check that templates, which take rows of the clustered MSA, leave one for the query."""
    if "data" not in tree:  # a multimer network, whose templates take no rows
        return
    data = tree.data
    templates, rows = data.eval.max_templates, data.eval.max_msa_clusters
    if data.common.reduce_msa_clusters_by_max_templates and rows <= templates:
        raise ConfigError(
            f"expected data.eval.max_msa_clusters above {templates}, because each of {templates} templates takes a row "
            f"of the clustered MSA, found {rows}: set model.overrides.data.eval.max_msa_clusters={templates + 1} or "
            "more"
        )
