"""The network to train is the one that was asked for: the same seed the same parameters, frozen ones frozen."""

from __future__ import annotations

import pytest
import torch

from fastfold.evoformer.execution import PolicyModule
from fastfold.parallel import DistributedContext
from fastfold.training.build import build_network, plain_network
from fastfold.training.compose import network_config
from tests.helpers.compositions import compose_run
from tests.training.conftest import TINY


def network(*overrides: str) -> torch.nn.Module:
    config = compose_run(TINY, "data.directory=x", "trainer.out=y", *overrides)
    return plain_network(config, network_config(config.model))


def test_the_seed_decides_the_parameters() -> None:
    first, again, other = (network(f"trainer.seed={seed}").state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_adapters_alone_are_trained_where_they_are_asked_for() -> None:
    model = network("finetune=lora")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert trained < {name for name, _ in model.named_parameters()}
    assert all("parametrizations" in name for name in trained)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_recomputed_blocks_keep_projections_on_a_cpu(checkpointing: bool) -> None:
    config = compose_run(
        TINY, "data.directory=x", "trainer.out=y", f"memory.checkpointing={str(checkpointing).lower()}"
    )
    context = DistributedContext(0, 1, torch.device("cpu"))
    model = build_network(config, network_config(config.model), context).module
    policies = {m.policy.keep_projections for m in model.modules() if isinstance(m, PolicyModule)}
    assert policies == {checkpointing}
