"""Settings of embeddings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.config import EmbedConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 0}, "layer must be from 1 to .*, found 0"),
        ({"layer": 2, "arrays": ("single",)}, "single exists after the last layer only"),
        ({"arrays": ("singles",)}, "arrays: expected single, pair, .* found 'singles'"),
        ({"arrays": "single"}, "arrays must be a list"),
        ({"arrays": ("single", "contacts"), "mean": True}, "the mean of contacts says nothing"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, found 'int8'"),
        ({"file_format": "npz"}, "file_format must be one of safetensors, hdf5, zarr, bioemu"),
        (
            {"file_format": "bioemu", "mean": True},
            "BioEmu reads single and pair of the last layer in float32",
        ),
        ({"file_format": "bioemu", "layer": 3}, "BioEmu reads single and pair"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        EmbedConfig(**settings)


def test_defaults_follow_the_layer():
    assert EmbedConfig().names == ("single", "pair")
    assert EmbedConfig(layer=3).names == ("msa_row", "pair")
    assert EmbedConfig(arrays=("pair", "single")).names == ("single", "pair")
    assert not EmbedConfig().needs_structure
    assert EmbedConfig(arrays=("contacts",)).needs_distogram
    with pytest.raises(ConfigError, match="layer 9: net has 8 Evoformer blocks"):
        EmbedConfig(layer=9).check_network("net", 8)


@pytest.mark.parametrize(
    "setting",
    [
        {"relax": "best"},
        {"stop_at_score": 50.0},
        {"save_distogram": True},
        {"cuda_graphs": True},
    ],
)
def test_settings_of_structures_are_refused(setting: dict[str, Any]):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} is not available for embeddings"):
        InferConfig(embed=EmbedConfig(), **setting)


def test_bioemu_has_no_recycling_and_one_seed():
    embed = EmbedConfig(file_format="bioemu")
    assert InferConfig(embed=embed).num_recycles == 0
    assert InferConfig(embed=embed, num_recycles=2).num_recycles == 2
    with pytest.raises(ConfigError, match="one embedding of a sequence"):
        InferConfig(embed=embed, seeds=(0, 1))
