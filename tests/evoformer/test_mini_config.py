"""The configuration of ``mini``: what official networks lack is read, what it leaves out is not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastfold.data.features import coevolution
from fastfold.data.features.pipeline import sampler_from_raw
from fastfold.data.features.raw import sequence_features
from fastfold.evoformer.config import PRESETS, model_config
from fastfold.evoformer.model import AlphaFold

LENGTH = 14


@pytest.fixture(scope="module")
def network() -> AlphaFold:
    torch.manual_seed(0)
    config = model_config("mini")
    config.model.embeddings_and_evoformer.evoformer_num_block = 2
    config.model.heads.structure_module.num_layer = 1
    config.model.global_config.zero_init = False
    return AlphaFold(config).eval()


def _features(network: AlphaFold, rows: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    msa = rng.integers(0, 20, (rows, LENGTH))
    sequence = "ACDEFGHIKLMNPQ"
    raw = sequence_features(sequence) | {
        "msa": msa.astype(np.int32),
        "deletion_matrix_int": np.zeros((rows, LENGTH), np.int32),
    }
    return {key: torch.as_tensor(x) for key, x in sampler_from_raw(raw, network.config).sample(0).items()}


def _distogram(network: AlphaFold, features: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return network(lambda cycle, member: dict(features), 0)["distogram"]["logits"]


def test_no_official_configuration_has_its_keys() -> None:
    for name in PRESETS:
        trunk = model_config(name).model.embeddings_and_evoformer
        assert "coevolution" not in trunk
        assert "sequence_convolution" not in trunk
        assert not any("enabled" in step for step in trunk.evoformer.values())


def test_steps_that_are_not_enabled_are_not_there(network: AlphaFold) -> None:
    for block in network.evoformer.blocks:
        assert block.msa_column_attention is None
        assert block.triangle_attention_starting is None
        assert block.triangle_attention_ending is None
    assert network.extra_msa_embedder is None
    assert sum(p.numel() for p in AlphaFold(model_config("mini")).parameters()) < 3_000_000


def test_features_hold_coevolution_where_the_network_takes_it(network: AlphaFold) -> None:
    alone, aligned = _features(network, 1), _features(network, 30)
    for name in coevolution.FEATURES:
        assert not alone[name].any()
        assert aligned[name].any()
        assert name not in sampler_from_raw(
            sequence_features("ACD")
            | {"msa": np.zeros((1, 3), np.int32), "deletion_matrix_int": np.zeros((1, 3), np.int32)},
            model_config("model_3_ptm"),
        ).sample(0)


@pytest.mark.parametrize("name", coevolution.FEATURES)
def test_the_network_reads_coevolution(network: AlphaFold, name: str) -> None:
    features = _features(network, 30)
    changed = features | {name: features[name] * 2}
    assert (_distogram(network, features) - _distogram(network, changed)).abs().max() > 1e-3


def test_convolutions_see_neighbours_and_no_further() -> None:
    config = model_config("mini").model.embeddings_and_evoformer.sequence_convolution
    from fastfold.evoformer.embedders.input import SequenceConvolution

    torch.manual_seed(0)
    layer = SequenceConvolution(config, 5).eval()
    x, mask = torch.randn(60, 5), torch.ones(60)
    moved = x.clone()
    moved[30] += 1
    changed = (layer(x, mask) - layer(moved, mask)).abs().amax(-1) > 1e-7
    reach = config.num_layer * (config.kernel_size // 2)
    assert changed[30 - reach : 31 + reach].all()
    assert not changed[: 30 - reach].any()
    assert not changed[31 + reach :].any()
    dropped = layer.train()(x, mask) == 0
    assert 0.5 < dropped.float().mean() / config.dropout_rate < 1.5
