"""Official model configurations by their official names (supplement, Table 5; AlphaFold-Multimer, section 7).

The trees have AlphaFold's keys, so that configurations written for other implementations can be read. Keys that only
control the official program's memory use (``subbatch_size``, ``use_remat``, …) are left out, because they do not
change results. A configuration that has them is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from importlib import resources
from typing import Any

import yaml
from ml_collections import ConfigDict

from fastfold.errors import ConfigError, suggest
from fastfold.utils.option_fields import check_kind

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

    Example:
        >>> from fastfold import model_config
        >>> model_config("model_1_ptm").model.embeddings_and_evoformer.evoformer_num_block
        48
    """
    check_kind("name of a model", name, str, "text")
    if name == MINI:
        return _mini()
    if name not in PRESETS:
        names = (*PRESETS, MINI)
        raise ConfigError(f"expected the name of a model, found {name!r}; {suggest(name, names, cutoff=0.0)}")
    return ConfigDict(preset_tree(name))


@cache
def preset_tree(name: str) -> dict[str, Any]:
    """Return the configuration of one of :data:`PRESETS` as plain dictionaries, which are not to be changed."""
    base, _, kind = name.partition("_multimer")
    if base != name:
        tree = _join("multimer", *(["multimer_v3"] if kind == "_v3" else []))
        if kind == "_v3" and int(base[-1]) < 4:
            tree["model"]["embeddings_and_evoformer"]["num_extra_msa"] = 2048
        return tree
    base = name.removesuffix("_ptm")
    max_extra_msa, templates = _MONOMER[base]
    parts = (("with_templates", templates), ("with_ptm", base != name))
    tree = _join("monomer", *(part for part, is_part in parts if is_part))
    tree["data"]["common"]["max_extra_msa"] = max_extra_msa
    return tree


@cache
def _trees() -> dict[str, Any]:
    text = resources.files("fastfold.evoformer").joinpath("networks.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _join(*names: str) -> dict[str, Any]:
    """Return a tree of the file, with the settings of all networks; later trees replace settings of earlier ones."""

    def join(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        inner = {
            key: join(tree.get(key, {}), value) for key, value in changes.items() if isinstance(value, dict)
        }
        return tree | changes | inner

    return reduce(join, (_trees()[name] for name in ("common", *names)), {})


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


def descent_settings(config: ConfigDict, *, is_needed: bool = False) -> ConfigDict | None:
    """Return the settings of the descent on the distogram, or None for a network without it.

    Settings that the weights lack have the value of ``networks.yaml``, and all of them if ``is_needed``.
    """
    own = config.model.heads.structure_module.get("distogram_descent")
    if own is None and not is_needed:
        return None
    return ConfigDict({**_trees()["distogram_descent"], **(own or {})})


def _mini() -> ConfigDict:
    """Return the configuration of ``mini``, a monomer network for a CPU with few MSA rows.

    Keys that official configurations do not have:

    - ``complexes``: see :func:`is_trained_on_complexes`.
    - ``coevolution``: read the features of :mod:`fastfold.data.features.coevolution`.
    - ``sequence_convolution``: 1-D convolutions over the features of each residue.
    - ``enabled`` of a step of the block: False to leave the step out.
    - ``smooth_lddt`` and ``ca_trace``: losses, see :mod:`fastfold.evoformer.losses.ca_atoms`.
    - ``distogram_descent``: see :func:`fastfold.evoformer.structure.distogram_descent.descend`.
    """
    tree = _join("monomer", "with_ptm", "mini")
    tree["model"]["heads"]["structure_module"]["distogram_descent"] = dict(_trees()["distogram_descent"])
    return ConfigDict(tree)
