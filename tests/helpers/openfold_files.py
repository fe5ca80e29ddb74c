"""OpenFold's state dicts of the recorded networks, in the names of its two eras."""

from __future__ import annotations

import functools
import re

import numpy as np
import torch
from torch import Tensor

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.names import PREFIX, alphafold_mappings, official_keys
from tests.helpers.networks import oracle_arrays, oracle_config


def official_arrays(name: str) -> dict[str, np.ndarray]:
    """Recorded parameters by official key, without the common prefix."""
    return {key.removeprefix(PREFIX): array for key, array in oracle_arrays(name, "params").items()}


def openfold_state(name: str, era: str) -> dict[str, Tensor]:
    """Recorded parameters as OpenFold would have them, to be changed.

    Args:
        name: Recorded run.
        era: ``v1`` (published monomer weights) or ``v2`` (since the multimer networks).
    """
    return {key: tensor.clone() for key, tensor in _openfold_state(name, era).items()}


@functools.cache
def _openfold_state(name: str, era: str) -> dict[str, Tensor]:
    config = oracle_config(name)
    with torch.device("meta"):
        model = AlphaFold(config)
    fused = bool(
        config.model.embeddings_and_evoformer.evoformer.triangle_multiplication_outgoing.fuse_projection_weights
    )
    names = official_keys(multimer=model.multimer, fused=fused, fused_templates=fused)
    by_key = {key: openfold for openfold, key in names.items()}
    mappings = {mapping.key: mapping for mapping in alphafold_mappings(model)}
    respell = {"v1": _first_era, "v2": _second_era}[era]
    state: dict[str, Tensor] = {}
    for key, array in official_arrays(name).items():
        flat = array.reshape(mappings[key].flat_shape)
        stacked = mappings[key].block is not None
        for i, block in enumerate(flat if stacked else [flat]):
            spelled = respell(by_key[key].replace("*", str(i)), multimer=model.multimer)
            state[spelled] = torch.from_numpy(_turned(spelled, block).copy())
    return state


def _turned(name: str, array: np.ndarray) -> np.ndarray:
    if re.search(r"template_pair_embedder\.(pseudo_beta_mask|[xyz]|backbone_mask)_linear\.weight", name):
        return array[:, None]
    if re.search(r"tri_mul_in\.linear_ab_[pg]", name):
        left, right = np.split(array, 2, axis=-1)
        array = np.concatenate([right, left], axis=-1)
    return array.T


def _first_era(name: str, *, multimer: bool) -> str:
    name = name.replace(
        "template_single_embedder.template_single_embedder", "template_angle_embedder.linear_1"
    )
    name = name.replace("template_single_embedder.template_projector", "template_angle_embedder.linear_2")
    if name.startswith(("evoformer.", "extra_msa_stack.")):
        name = re.sub(
            r"(blocks\.\d+)\.(msa_transition|outer_product_mean|tri_|pair_transition)", r"\1.core.\2", name
        )
    return re.sub(r"^(evoformer\..*\.msa_att_col)\.", r"\1._msa_att.", name)


def _second_era(name: str, *, multimer: bool) -> str:
    if not multimer:
        inner = "template_single_embedder"
        name = name.replace(f"{inner}.template_single_embedder", f"{inner}.linear_1")
        name = name.replace(f"{inner}.template_projector", f"{inner}.linear_2")
    if name.startswith(("template_", "linear_t.")):
        return f"template_embedder.{name}"
    name = re.sub(r"(ipa\.linear_\w+_points)\.", r"\1.linear.", name)
    name = re.sub(r"(blocks\.\d+)\.(tri_|pair_transition)", r"\1.pair_stack.\2", name)
    return re.sub(r"^(evoformer\..*\.msa_att_col)\.", r"\1._msa_att.", name)
