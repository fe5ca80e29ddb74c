"""The network to train is the one that was asked for: the same seed the same parameters, frozen ones frozen."""

from __future__ import annotations

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.execution import PolicyModule
from fastfold.parallel import DistributedContext
from fastfold.training.build import parallel_network, plain_network
from fastfold.training.compose import network_config
from fastfold.training.run import train
from tests.helpers.compositions import compose_run
from tests.training.conftest import TINY


def network(*overrides: str) -> torch.nn.Module:
    config = compose_run(TINY, "data.directory=x", "trainer.out=y", *overrides)
    return plain_network(config, network_config(config.model))


def test_the_seed_decides_the_parameters() -> None:
    first, again, other = (network(f"trainer.seed={seed}").state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("step", ["msa_row_attention_with_pair_bias", "msa_column_attention"])
def test_heads_that_do_not_divide_their_channels_are_refused_before_data_are_read(
    step: str, heads: int
) -> None:
    setting = f"model.overrides.model.embeddings_and_evoformer.evoformer.{step}.num_head"
    places = ("data.directory=missing", "trainer.out=y")
    message = rf"extra_msa_stack.blocks.0.*attention has 8 channels, which its {heads} heads do not divide"
    with pytest.raises(ConfigError, match=message):
        train(compose_run(TINY, f"{setting}={heads}", *places))
    with pytest.raises(ConfigError, match="the data folder 'missing' does not exist"):
        train(compose_run(TINY, f"{setting}=8", *places))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("evofomer.*", "no parameter's name matches 'evofomer"), ("'*'", "nothing is left to train")],
)
def test_parameters_to_freeze_are_looked_up_before_data_are_read(pattern: str, message: str) -> None:
    config = compose_run(TINY, "data.directory=missing", "trainer.out=y", f"finetune.freeze=[{pattern}]")
    with pytest.raises(ConfigError, match=message):
        train(config)


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
    plain = plain_network(config, network_config(config.model))
    model = parallel_network(plain, config, context).module
    policies = {m.policy.keep_projections for m in model.modules() if isinstance(m, PolicyModule)}
    assert policies == {checkpointing}
