"""What ``fastfold plan`` counts without making a network is what the network has."""

from __future__ import annotations

import pytest

from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning.report import count_parameters
from tests.helpers.networks import oracle_config


@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_parameters_are_counted_without_making_them(name: str) -> None:
    config = oracle_config(name)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = 3, 2
    assert count_parameters(config) == sum(p.numel() for p in AlphaFold(config).parameters())
    assert trunk.evoformer_num_block == 3  # the configuration is as it was
