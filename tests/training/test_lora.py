"""Adapters and frozen parts: what trains, what stays, and that merged weights are the adapted network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fastfold.errors import ConfigError, WeightsError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import load_model, save_weights
from fastfold.training.lora import add_lora, freeze, merge_lora
from fastfold.training.optim.ema import ExponentialMovingAverage
from tests.helpers.networks import oracle_config, oracle_features, random_model


@cache
def base() -> AlphaFold:
    """The network without adapters; not to be changed."""
    return random_model(oracle_config())


def lora_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x for name, x in model.state_dict().items() if ".parametrizations.weight.0." in name}


def adapted(*, trained: bool = False, rank: int = 2) -> AlphaFold:
    """The network with adapters, which differ from zero if ``trained``."""
    model = copy.deepcopy(base())
    add_lora(model, rank=rank)
    if trained:
        torch.manual_seed(1)
        with torch.no_grad():
            for name, x in lora_state_dict(model).items():
                if name.endswith(".b"):
                    x.normal_(std=0.05)
    return model


@cache
def trained() -> AlphaFold:
    """The network with trained adapters; not to be changed."""
    return adapted(trained=True)


@cache
def expected_outputs(network: Callable[[], AlphaFold]) -> dict[str, torch.Tensor]:
    """Results of :func:`base` or :func:`trained`."""
    return outputs(network())


def outputs(model: AlphaFold) -> dict[str, torch.Tensor]:
    """Some results that depend on every part of the network."""
    with torch.no_grad():
        result = model(oracle_features(), 0)
    return {
        "positions": result["structure_module"]["final_atom_positions"],
        "plddt": result["predicted_lddt"]["logits"],
        "msa": result["masked_msa"]["logits"],
        "pair": result["distogram"]["logits"],
    }


def test_new_adapters_change_nothing():
    """Bit by bit: B starts with zeros."""
    expected, got = expected_outputs(base), outputs(adapted())
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_a_network_without_memory_has_the_same_adapters():
    """As the check of a run's settings builds it before the data are read."""
    with torch.device("meta"):
        model = AlphaFold(oracle_config())
        names = add_lora(model, rank=2)
    assert names == add_lora(copy.deepcopy(base()), rank=2)


def test_gradient_reaches_every_adapter_and_nothing_else():
    """Through the fused operators, which read the layers' weights instead of calling the layers."""
    model = copy.deepcopy(trained())
    result = model(oracle_features(), 0)
    loss = sum(
        x.square().mean()
        for x in (
            result["structure_module"]["final_atom_positions"],
            result["structure_module"]["final_affines"],
            result["predicted_lddt"]["logits"],
            result["masked_msa"]["logits"],
            result["distogram"]["logits"],
        )
    )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    adapters = set(lora_state_dict(model))
    silent = [n for n in adapters if gradients[n] is None or not bool(gradients[n].any())]
    assert silent == []
    assert [name for name, grad in gradients.items() if grad is not None and name not in adapters] == []


@pytest.mark.long
def test_gradient_of_an_adapter_is_that_of_its_definition():
    """dB = s G Aᵀ and dA = s Bᵀ G, where G is the gradient of the merged weight."""
    model = copy.deepcopy(trained()).double()
    plain = merge_lora(copy.deepcopy(model)).requires_grad_(True)
    features = oracle_features(dtype=torch.float64)
    for network in (model, plain):
        network(features, 0)["distogram"]["logits"].square().mean().backward()
    for name in (
        "evoformer.blocks.0.msa_row_attention.attention.key",
        "evoformer.blocks.1.pair_transition.hidden",
    ):
        low = model.get_submodule(name).parametrizations.weight[0]
        grad = plain.get_submodule(name).weight.grad
        torch.testing.assert_close(low.b.grad, 8.0 * grad @ low.a.T, rtol=1e-8, atol=1e-14)
        torch.testing.assert_close(low.a.grad, 8.0 * low.b.T @ grad, rtol=1e-8, atol=1e-14)


@pytest.mark.long
def test_adapters_stand_on_all_attention_and_transition_layers():
    model = copy.deepcopy(base())
    names = add_lora(model, rank=2)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert names == [n for n in linear if "attention" in n or "transition" in n]
    assert "extra_msa_stack.blocks.0.msa_column_attention.attention.key" in names
    assert "structure_module.attention.query_points" in names
    assert not any("triangle_multiplication" in n or "heads" in n for n in names)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(lora_state_dict(model))


def test_rank_beyond_a_layers_sides_is_cut():
    model = nn.ModuleDict({"attention": nn.Linear(4, 2)})
    add_lora(model, rank=8, targets=["attention"])
    assert {n: tuple(x.shape) for n, x in lora_state_dict(model).items()} == {
        "attention.parametrizations.weight.0.a": (2, 4),
        "attention.parametrizations.weight.0.b": (2, 2),
    }


def test_merged_network_computes_the_same_under_the_original_names():
    expected = expected_outputs(trained)
    assert not torch.equal(expected["pair"], expected_outputs(base)["pair"])
    merged = merge_lora(copy.deepcopy(trained()))
    got = outputs(merged)
    for key, x in expected.items():
        torch.testing.assert_close(got[key], x, rtol=1e-6, atol=1e-6)
    assert list(merged.state_dict()) == list(base().state_dict())
    assert lora_state_dict(merged) == {}
    assert type(merged.evoformer.blocks[0].pair_transition.hidden) is type(
        base().evoformer.blocks[0].pair_transition.hidden
    )


def test_merging_a_copy_leaves_the_original_as_it_was():
    """Copies share their layers' classes: a trap of PyTorch's own removal."""
    model = adapted(trained=True)
    expected = outputs(model)
    merge_lora(copy.deepcopy(model))
    got = outputs(model)
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_merged_weights_are_a_plain_weights_file(tmp_path):
    """And those with adapters are refused there, instead of losing them."""
    model, config = trained(), oracle_config()
    path = tmp_path / "merged.safetensors"
    with pytest.raises(WeightsError):
        save_weights(path, model, config)
    save_weights(path, merge_lora(copy.deepcopy(model)), config)
    loaded, expected = outputs(load_model(path)), expected_outputs(trained)
    for key, x in expected.items():
        torch.testing.assert_close(loaded[key], x, rtol=1e-6, atol=1e-6)


def test_adapters_alone_restore_the_adapted_network():
    model, other = trained(), adapted()
    missing, unexpected = other.load_state_dict(lora_state_dict(model), strict=False)
    assert unexpected == []
    assert not any(".0.a" in name or ".0.b" in name for name in missing if "parametrizations" in name)
    expected = model.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in lora_state_dict(other).items())


def test_average_of_the_weights_covers_the_adapters_alone():
    assert set(ExponentialMovingAverage(trained()).tensors()) == set(lora_state_dict(trained()))


def test_adapted_weight_keeps_its_precision_under_autocast():
    model = nn.ModuleDict({"attention": nn.Linear(8, 8)})
    add_lora(model, rank=2, targets=["attention"])
    nn.init.normal_(model["attention"].parametrizations.weight[0].b)
    expected = model["attention"].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model["attention"].weight, expected)


def test_adapters_cannot_be_added_twice():
    with pytest.raises(ConfigError, match="merge"):
        add_lora(adapted())


def test_mistaken_target_leaves_the_network_alone():
    model = copy.deepcopy(base())
    with pytest.raises(ConfigError, match=r"'transitoin'.*transition"):
        add_lora(model, targets=("attention", "transitoin"))
    assert not any(parametrize.is_parametrized(m) for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_layers_get_no_adapters():
    model = copy.deepcopy(base())
    freeze(model, ["evoformer.*"])
    names = add_lora(model, rank=2)
    assert names
    assert not any(name.startswith("evoformer.") for name in names)
    assert not any(p.requires_grad for name, p in model.named_parameters() if name.startswith("evoformer."))


def test_adapters_on_frozen_layers_alone_are_refused():
    model = copy.deepcopy(base())
    freeze(model, ["*attention*"])
    with pytest.raises(ConfigError, match="frozen"):
        add_lora(model, targets=["attention"])


def test_rank_zero_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        add_lora(copy.deepcopy(base()), rank=0)


def test_freeze_takes_shell_patterns():
    model = copy.deepcopy(base())
    names = freeze(model, ["evoformer.*", "*.norm.weight"])
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert sorted(names) == sorted(frozen)
    assert set(frozen) == {
        n for n, _ in model.named_parameters() if n.startswith("evoformer.") or n.endswith(".norm.weight")
    }


def test_frozen_shared_parameter_is_found_under_both_names():
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "rest": nn.Linear(2, 2)})
    model["other"] = model["one"]
    freeze(model, ["other.*"])
    assert not model["one"].weight.requires_grad


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("evofromer.*", r"evoformer\.\*"),
        ("structure_module.initial.wieght", r"structure_module\.initial\.weight"),
    ],
)
def test_pattern_without_match_names_near_names_and_freezes_nothing(pattern, near):
    model = copy.deepcopy(base())
    with pytest.raises(ConfigError, match=near):
        freeze(model, ["heads.*", pattern])
    assert all(p.requires_grad for p in model.parameters())


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="nothing is left"):
        freeze(copy.deepcopy(base()), ["*"])
