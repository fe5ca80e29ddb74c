"""OpenFold's state dicts of the recorded networks, in the names of its two eras."""

from __future__ import annotations

import functools
import re

import numpy as np
import torch
from torch import Tensor

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.names import PREFIX, alphafold_mappings, known_names
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
    names = known_names(multimer=model.multimer, fused=fused, fused_templates=fused)
    by_key = {row.official: row.openfold for row in names}
    mappings = {mapping.key: mapping for mapping in alphafold_mappings(model)}
    respell = {"v1": _first_era, "v2": str}[era]
    state: dict[str, Tensor] = {}
    for key, array in official_arrays(name).items():
        flat = array.reshape(mappings[key].flat_shape)
        stacked = mappings[key].block is not None
        for i, block in enumerate(flat if stacked else [flat]):
            spelled = respell(by_key[key].replace("*", str(i)))
            state[spelled] = torch.from_numpy(_turned(spelled, block).copy())
    return state


def _turned(name: str, array: np.ndarray) -> np.ndarray:
    if re.search(r"template_pair_embedder\.(pseudo_beta_mask|[xyz]|backbone_mask)_linear\.weight", name):
        return array[:, None]
    if re.search(r"tri_mul_in\.linear_ab_[pg]", name):
        left, right = np.split(array, 2, axis=-1)
        array = np.concatenate([right, left], axis=-1)
    return array.T


def _first_era(name: str) -> str:
    name = name.removeprefix("template_embedder.")
    name = name.replace("template_single_embedder", "template_angle_embedder").replace(
        "_points.linear", "_points"
    )
    inner = r"(blocks\.\d+)\.(?:pair_stack\.)?(msa_transition|outer_product_mean|tri_|pair_transition)"
    return re.sub(inner, r"\1.core.\2", name) if name.startswith(("evoformer.", "extra_msa_stack.")) else name
