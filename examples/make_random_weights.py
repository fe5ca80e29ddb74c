"""Write a small network with random parameters in the official file format.

Usage: python make_random_weights.py OUT.npz
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from ml_collections import ConfigDict

from fastfold.evoformer.checkpoint import convert, save_weights
from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold


def small_config() -> ConfigDict:
    """``model_1_ptm`` with a tenth of the channels and two Evoformer blocks."""
    config = model_config("model_1_ptm")
    trunk = config.model.embeddings_and_evoformer
    trunk.update(
        {
            "evoformer_num_block": 2,
            "extra_msa_stack_num_block": 1,
            "msa_channel": 32,
            "extra_msa_channel": 16,
            "pair_channel": 32,
            "seq_channel": 48,
        }
    )
    steps = trunk.evoformer
    steps.outer_product_mean.num_outer_channel = 8
    for name in ("outgoing", "incoming"):
        steps[f"triangle_multiplication_{name}"].num_intermediate_channel = 32
        trunk.template.template_pair_stack[f"triangle_multiplication_{name}"].num_intermediate_channel = 16
    for node in ("starting_node", "ending_node"):
        trunk.template.template_pair_stack[f"triangle_attention_{node}"].update(
            {"key_dim": 16, "value_dim": 16}
        )
    trunk.template.attention.update({"key_dim": 16, "value_dim": 16})
    heads = config.model.heads
    heads.structure_module.update({"num_channel": 48, "num_head": 4})
    heads.structure_module.sidechain.num_channel = 32
    heads.predicted_lddt.num_channels = 32
    return config


def main() -> None:
    """Make the file named on the command line."""
    torch.manual_seed(0)
    config = small_config()
    config.model.global_config.zero_init = False
    model = AlphaFold(config)
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "model.safetensors"
        save_weights(ours, model, config)
        convert(ours, sys.argv[1])


if __name__ == "__main__":
    main()
