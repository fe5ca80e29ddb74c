"""The structure module has channels of its own, beside those of the single representation that it gets."""

from __future__ import annotations

from pathlib import Path

import torch

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.structure.structure_module import StructureModule
from fastfold.evoformer.weights.checkpoint import convert, read_weights, save_weights
from tests.helpers.networks import shallow_config


def test_the_single_representation_may_be_wider_or_narrower(tmp_path: Path) -> None:
    """The initial single representation also reaches the torsion angles (supplement Algorithm 20, line 11)."""
    config = shallow_config()
    node, trunk = config.model.heads.structure_module, config.model.embeddings_and_evoformer
    trunk.seq_channel = node.num_channel + 4
    module = StructureModule(
        node, trunk.seq_channel, trunk.pair_channel, multimer=False, zero_init=False
    ).eval()
    torch.manual_seed(0)
    single, pair = torch.randn(6, trunk.seq_channel), torch.randn(6, 6, trunk.pair_channel)
    aatype, mask = torch.arange(6), torch.ones(6)

    def angles() -> torch.Tensor:
        result: torch.Tensor = module(single, pair, aatype, mask)["sidechains"]["angles_sin_cos"]
        return result

    before = angles()
    assert before.shape == (node.num_layer, 6, 7, 2)
    with torch.no_grad():
        module.angles.initial_input.weight[:, -1] += 1.0
    assert not torch.equal(angles(), before)
    # The official layout states all sizes.
    model = AlphaFold(config)
    save_weights(tmp_path / "wide.safetensors", model, config)
    convert(tmp_path / "wide.safetensors", tmp_path / "wide.npz")
    info, state = read_weights(tmp_path / "wide.npz")
    assert info.config.model.embeddings_and_evoformer.seq_channel == trunk.seq_channel
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
