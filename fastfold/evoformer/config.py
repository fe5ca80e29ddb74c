"""Official model configurations by their official names (supplement, Table 5; AlphaFold-Multimer, section 7).

The trees have AlphaFold's keys, so that configurations written for other implementations can be read. Keys that only
control the official program's memory use (``subbatch_size``, ``use_remat``, …) are left out, because they do not
change results. A configuration that has them is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from fastfold.errors import ConfigError, suggest

# Rows of the extra MSA; True if the network has templates.
_MONOMER = {
    "model_1": (5120, True),
    "model_2": (1024, True),
    "model_3": (5120, False),
    "model_4": (5120, False),
    "model_5": (1024, False),
}

PRESETS: tuple[str, ...] = (
    *_MONOMER,
    *(f"{name}_ptm" for name in _MONOMER),
    *(f"{name}_multimer{version}" for version in ("", "_v2", "_v3") for name in _MONOMER),
)
"""Every name that :func:`model_config` knows. ``_multimer`` without a version is version 1."""


MINI = "mini"  #: Name of the small network that ships with the package; not an official model


def model_config(name: str) -> ConfigDict:
    """Return a fresh tree of an official model in :data:`PRESETS`, or of :data:`MINI`, with AlphaFold's keys.

    Raises:
        ConfigError: The name is unknown; the message names the closest one.
    """
    if name == MINI:
        return _mini()
    if name not in PRESETS:
        names = (*PRESETS, MINI)
        raise ConfigError(f"expected the name of a model, found {name!r}; {suggest(name, names, cutoff=0.0)}")
    return ConfigDict(preset_tree(name))


def preset_tree(name: str) -> dict[str, Any]:
    """Return the configuration of one of :data:`PRESETS` as plain dictionaries, which are quick to make."""
    base, _, kind = name.partition("_multimer")
    if base != name:
        return _multimer(int(base[-1]), version=int(kind[-1]) if kind else 1)
    base = name.removesuffix("_ptm")
    return _monomer(*_MONOMER[base], ptm=base != name)


def is_multimer(config: Mapping[str, Any]) -> bool:
    """Return True if a configuration describes the multimer network."""
    return bool(config["model"]["global_config"]["multimer_mode"])


def is_trained_on_complexes(config: Mapping[str, Any]) -> bool:
    """Return True unless ``model.complexes`` says that the network was trained on single chains only.

    DeepMind's monomer networks count as trained on complexes: folding a complex as one chain with a gap in its residue
    numbers is an established use of these networks.
    """
    return bool(config["model"].get("complexes", True))


def has_whole_blocks(config: Mapping[str, Any]) -> bool:
    """Return True if the Evoformer's blocks have all of AlphaFold's steps."""
    steps = config["model"]["embeddings_and_evoformer"]["evoformer"].values()
    return all(step.get("enabled", True) for step in steps if isinstance(step, Mapping | ConfigDict))


def ensemble_size(config: Mapping[str, Any]) -> int:
    """Return the number of feature samples whose representations each cycle averages."""
    if is_multimer(config):
        return int(config["model"]["num_ensemble_eval"])
    return int(config["data"]["eval"]["num_ensemble"])


def _step(rate: float, orientation: str = "per_row", **extra: Any) -> dict[str, Any]:
    return {"dropout_rate": rate, "orientation": orientation, "shared_dropout": True, **extra}


def _pair_steps(c: int, *, factor: int, fused: bool, **attention: Any) -> dict[str, Any]:
    heads: dict[str, Any] = {"gating": True, "num_head": 4, **attention}
    edges: dict[str, Any] = {"num_intermediate_channel": c, "fuse_projection_weights": fused}
    return {
        "triangle_attention_starting_node": _step(0.25, **heads),
        "triangle_attention_ending_node": _step(0.25, "per_column", **heads),
        "triangle_multiplication_outgoing": _step(0.25, equation="ikc,jkc->ijc", **edges),
        "triangle_multiplication_incoming": _step(0.25, equation="kjc,kic->ijc", **edges),
        "pair_transition": _step(0.0, num_intermediate_factor=factor),
    }


def _trunk(*, outer_first: bool, fused: bool) -> dict[str, Any]:
    heads: dict[str, Any] = {"gating": True, "num_head": 8}
    return {
        "evoformer_num_block": 48,
        "evoformer": {
            "msa_row_attention_with_pair_bias": _step(0.15, **heads),
            "msa_column_attention": _step(0.0, "per_column", **heads),
            "msa_transition": _step(0.0, num_intermediate_factor=4),
            "outer_product_mean": _step(0.0, first=outer_first, num_outer_channel=32),
            **_pair_steps(128, factor=4, fused=fused),
        },
        "extra_msa_channel": 64,
        "extra_msa_stack_num_block": 4,
        "msa_channel": 256,
        "pair_channel": 128,
        "seq_channel": 384,
        "prev_pos": {"min_bin": 3.25, "max_bin": 20.75, "num_bins": 15},
        "recycle_features": True,
        "recycle_pos": True,
    }


def _heads(*, position_scale: float, pae_weight: float, structure: dict[str, Any]) -> dict[str, Any]:
    resolution = {"filter_by_resolution": True, "min_resolution": 0.1, "max_resolution": 3.0}
    return {
        "distogram": {"first_break": 2.3125, "last_break": 21.6875, "num_bins": 64, "weight": 0.3},
        "predicted_aligned_error": {
            **{"max_error_bin": 31.0, "num_bins": 64, "num_channels": 128, "weight": pae_weight},
            **resolution,
        },
        "experimentally_resolved": {"weight": 0.01, **resolution},
        "predicted_lddt": {"num_bins": 50, "num_channels": 128, "weight": 0.01, **resolution},
        "masked_msa": {"weight": 2.0},
        "structure_module": {
            **{"num_layer": 8, "num_channel": 384, "num_head": 12, "num_layer_in_transition": 3},
            **{"num_point_qk": 4, "num_point_v": 8, "num_scalar_qk": 16, "num_scalar_v": 16},
            **{"position_scale": position_scale, "dropout": 0.1},
            **{"angle_norm_weight": 0.01, "chi_weight": 0.5, "clash_overlap_tolerance": 1.5},
            **{"structural_violation_loss_weight": 1.0, "violation_tolerance_factor": 12.0, "weight": 1.0},
            **structure,
        },
    }


_MASKING = {"profile_prob": 0.1, "same_prob": 0.1, "uniform_prob": 0.1}
_SIDECHAIN = {"num_channel": 128, "num_residual_block": 2, "weight_frac": 0.5}
_TEMPLATE_DISTANCES = {"min_bin": 3.25, "max_bin": 50.75, "num_bins": 39}


def _monomer(max_extra_msa: int, templates: bool, *, ptm: bool) -> dict[str, Any]:
    trunk = _trunk(outer_first=False, fused=False) | {
        "max_relative_feature": 32,
        "template": {
            "attention": {"gating": False, "key_dim": 64, "num_head": 4, "value_dim": 64},
            "dgram_features": _TEMPLATE_DISTANCES,
            "embed_torsion_angles": templates,
            "enabled": templates,
            "max_templates": 4,
            "template_pair_stack": {
                "num_block": 2,
                **_pair_steps(64, factor=2, fused=False, key_dim=64, value_dim=64),
            },
            "use_template_unit_vector": False,
        },
    }
    structure = {
        "fape": {"clamp_distance": 10.0, "clamp_type": "relu", "loss_unit_distance": 10.0},
        "sidechain": {"atom_clamp_distance": 10.0, **_SIDECHAIN, "length_scale": 10.0},
    }
    heads = _heads(position_scale=10.0, pae_weight=0.1 if ptm else 0.0, structure=structure)
    heads["masked_msa"]["num_output"] = 23
    return {
        "data": {
            "common": {
                "masked_msa": _MASKING,
                "max_extra_msa": max_extra_msa,
                "msa_cluster_features": True,
                "num_recycle": 3,
                "reduce_msa_clusters_by_max_templates": templates,
                "resample_msa_in_recycling": True,
                "use_templates": templates,
            },
            "eval": {
                "masked_msa_replace_fraction": 0.15,
                "max_msa_clusters": 512,
                "max_templates": 4,
                "num_ensemble": 1,
                "subsample_templates": False,
            },
        },
        "model": {
            "embeddings_and_evoformer": trunk,
            "global_config": {"multimer_mode": False, "zero_init": True},
            "heads": heads,
            "num_recycle": 3,
            "resample_msa_in_recycling": True,
        },
    }


_DESCENT = {
    **{"steps": 100, "rate": 0.004, "momentum": 0.9, "largest_force": 100.0},
    **{"overlap": 25.0, "overlap_distance": 4.3, "bond": 30.0, "local": 20.0, "window": 4},
    **{
        "local_start": 5.0,
        "twist": 2.0,
        "last_steps": 100,
        "lddt": 15.0,
        "agreement": 40.0,
        "share": 0.8,
        "stiffness": 2.0,
    },
}


def descent_settings(config: ConfigDict) -> ConfigDict | None:
    """Return the settings of the descent on the distogram, or None for a network without it.

    Weights that were written before a setting existed get today's value.
    """
    found = config.model.heads.structure_module.get("distogram_descent")
    return None if found is None else ConfigDict({**_DESCENT, **found})


def _mini() -> ConfigDict:
    """Return the configuration of ``mini``, a monomer network for a CPU with few MSA rows.

    Keys that official configurations do not have:

    - ``complexes``: see :func:`is_trained_on_complexes`.
    - ``coevolution``: read the features of :mod:`fastfold.data.features.coevolution`.
    - ``sequence_convolution``: 1-D convolutions over the features of each residue.
    - ``enabled`` of a step of the block: False to leave the step out.
    - ``smooth_lddt`` and ``ca_trace``: losses, see :mod:`fastfold.evoformer.losses.smooth_lddt` and
      :mod:`fastfold.evoformer.losses.ca_trace`.
    - ``distogram_descent``: see :func:`fastfold.evoformer.structure.distogram_descent.descend`.
    """
    config = ConfigDict(_monomer(0, False, ptm=True))
    trunk, heads = config.model.embeddings_and_evoformer, config.model.heads
    config.model.complexes = False
    config.data.common.max_extra_msa = 1
    config.data.eval.max_msa_clusters = 8
    config.data.eval.masked_msa_replace_fraction = 0.1
    trunk.update(evoformer_num_block=6, extra_msa_stack_num_block=0, extra_msa_channel=1)
    trunk.update(msa_channel=64, pair_channel=64, seq_channel=128)
    trunk.coevolution = True
    trunk.sequence_convolution = ConfigDict(
        {"num_layer": 3, "kernel_size": 9, "num_channel": 96, "dropout_rate": 0.15}
    )
    block = trunk.evoformer
    block.msa_row_attention_with_pair_bias.update(num_head=4, dropout_rate=0.05)
    block.msa_transition.num_intermediate_factor = 2
    block.outer_product_mean.num_outer_channel = 12
    for direction in ("outgoing", "incoming"):
        block[f"triangle_multiplication_{direction}"].update(num_intermediate_channel=32, dropout_rate=0.05)
    block.pair_transition.num_intermediate_factor = 2
    block.msa_column_attention.enabled = False
    for node in ("starting", "ending"):
        block[f"triangle_attention_{node}_node"].enabled = False
    heads.distogram.weight = 1.0
    heads.masked_msa.weight = 0.1
    heads.predicted_aligned_error.weight = 0.01
    heads.structure_module.update(num_layer=8, num_channel=128, num_head=8, dropout=0.05)
    heads.structure_module.sidechain.num_channel = 64
    heads.structure_module.structural_violation_loss_weight = 0.02
    heads.structure_module.smooth_lddt = ConfigDict({"weight": 10.0, "cutoff": 15.0})
    heads.structure_module.ca_trace = ConfigDict(
        {"weight": 1.0, "overlap": 3.0, "overlap_distance": 4.5, "bond": 1.0, "radius": 30.0}
    )
    heads.structure_module.distogram_descent = ConfigDict(_DESCENT)
    return config


def _multimer(number: int, *, version: int) -> dict[str, Any]:
    latest = version == 3
    trunk = _trunk(outer_first=True, fused=latest) | {
        "num_msa": 508 if latest else 252,
        "num_extra_msa": 2048 if latest and number < 4 else 1152,
        "masked_msa": {**_MASKING, "replace_fraction": 0.15},
        "use_chain_relative": True,
        "max_relative_chain": 2,
        "max_relative_idx": 32,
        "template": {
            "attention": {"gating": False, "num_head": 4},
            "dgram_features": _TEMPLATE_DISTANCES,
            "enabled": True,
            "max_templates": 4,
            "num_channels": 64,
            "template_pair_stack": {"num_block": 2, **_pair_steps(64, factor=2, fused=latest)},
        },
    }
    structure = {
        # Both are not in the official tree, which is for inference only; the paper does not state the first weight.
        "chain_center_of_mass": {"length_scale": 20.0, "tolerance": 4.0, "weight": 1.0},
        "violation": {"angle_weight": 1.0, "mean_of_clashing_atoms": False},
        "interface_fape": {"atom_clamp_distance": 1000.0, "loss_unit_distance": 20.0},
        "intra_chain_fape": {"atom_clamp_distance": 10.0, "loss_unit_distance": 10.0},
        "sidechain": {"atom_clamp_distance": 10.0, "loss_unit_distance": 10.0, **_SIDECHAIN},
    }
    return {
        "model": {
            "embeddings_and_evoformer": trunk,
            "global_config": {"multimer_mode": True, "zero_init": True},
            "heads": _heads(position_scale=20.0, pae_weight=0.1, structure=structure),
            "num_ensemble_eval": 1,
            "num_recycle": 20,
            "recycle_early_stop_tolerance": 0.5,
            "resample_msa_in_recycling": True,
        }
    }
