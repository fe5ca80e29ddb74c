"""State dicts without a configuration: it is inferred from our names' shapes as from the official ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.config import MINI, PRESETS, model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import read_weights, weights_info
from fastfold.evoformer.weights.infer_config import infer_config, preset_of
from fastfold.evoformer.weights.mapping import check_parameters, own_mappings
from fastfold.evoformer.weights.names import alphafold_mappings
from fastfold.evoformer.weights.state_dict_file import OwnParameters, infer_own_config, is_own
from tests.helpers.networks import oracle_config
from tests.helpers.weights_files import OURS, PARAMS, same

DISTINCT = ("model_1", "model_3", "model_1_ptm", "model_3_ptm", "model_1_multimer_v3", MINI)


def network(config: object) -> AlphaFold:
    with torch.device("meta"):
        return AlphaFold(config)


@pytest.mark.parametrize("name", DISTINCT)
def test_configurations_are_inferred_from_shapes(name: str) -> None:
    """Names of files decide between presets of equal shapes."""
    config = model_config(name)
    shapes = {key: tuple(value.shape) for key, value in network(config).state_dict().items()}
    assert is_own(shapes)
    inferred = infer_own_config(shapes, name_hint=f"params_{name}.ckpt")
    assert inferred == config
    assert name not in PRESETS or preset_of(inferred, f"params_{name}.ckpt") == name


@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_own_shapes_say_what_official_shapes_say(name: str) -> None:
    """For a network of other sizes, every one of them."""
    model = network(oracle_config(name))
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    official = {mapping.key: mapping.flat_shape for mapping in alphafold_mappings(model)}
    expected = infer_config(official)
    trunk = expected.model.embeddings_and_evoformer
    inferred = infer_own_config(own)
    # Whether products are fused is in official names only.
    for tree in (trunk, inferred.model.embeddings_and_evoformer):
        for steps in (tree.evoformer, tree.template.template_pair_stack):
            steps.triangle_multiplication_outgoing.fuse_projection_weights = False
            steps.triangle_multiplication_incoming.fuse_projection_weights = False
    assert inferred == expected


def test_changed_sizes_of_mini_are_inferred() -> None:
    config = model_config(MINI)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.pair_channel = 3, 32
    shapes = {key: tuple(value.shape) for key, value in network(config).state_dict().items()}
    inferred = infer_own_config(shapes)
    check_parameters(own_mappings(network(inferred)), OwnParameters(dict(network(config).state_dict()), "a"))
    assert inferred == config


def test_safetensors_of_other_programs_are_read_under_our_names(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    save_file(state, tmp_path / "a.safetensors")
    info, found = read_weights(tmp_path / "a.safetensors")
    assert (info.kind, info.dtype) == ("state dict", "float32")
    assert info.config == weights_info(PARAMS).config
    assert same(found, state)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_other_parameters_are_named(tmp_path: Path, state: dict[str, Tensor], ending: str) -> None:
    changed = {name: value for name, value in state.items() if name != OURS} | {"surprise": torch.zeros(2)}
    path = tmp_path / f"a.{ending}"
    (save_file if ending == "safetensors" else torch.save)(changed, path)
    with pytest.raises(WeightsError, match=rf"{re.escape(OURS)} is missing.*surprise is not in this network"):
        read_weights(path, config=oracle_config())
