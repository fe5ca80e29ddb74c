"""Dropout, initialisation, activation checkpointing and gradients are the paper's."""

from __future__ import annotations

import math

import pytest
import torch

from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.losses import alphafold_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.primitives import Linear, SharedDropout
from tests.helpers.networks import oracle_config, oracle_features, random_model, shallow_config


@pytest.mark.parametrize(("shared_dim", "shape"), [(-3, (1, 9, 4)), (-2, (8, 1, 4))])
def test_dropout_is_shared_along_one_axis(shared_dim: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dropout = SharedDropout(0.25, shared_dim).train()
    factors = dropout(torch.zeros(8, 9, 4))
    assert factors is not None
    assert factors.shape == shape
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert dropout.eval()(torch.zeros(8, 9, 4)) is None


def test_dropout_keeps_the_expected_share() -> None:
    torch.manual_seed(0)
    factors = SharedDropout(0.15, -3).train()(torch.zeros(1, 1000, 100))
    assert factors is not None
    assert (factors > 0).double().mean().item() == pytest.approx(0.85, abs=0.005)
    assert factors.mean().item() == pytest.approx(1.0, abs=0.01)


def test_official_dropout_rates_and_axes() -> None:
    """Supplement, Algorithm 6: rowwise 0.15 on the MSA, 0.25 on the pair, columnwise for the ending node."""
    block = EvoformerBlock(model_config("model_1").model.embeddings_and_evoformer.evoformer, 8, 8)
    found = {
        name: (m.rate, m.shared_dim)
        for name, m in block.named_modules()
        if isinstance(m, SharedDropout) and m.rate
    }
    assert found == {
        "msa_row_attention.dropout": (0.15, -3),
        "triangle_multiplication_outgoing.dropout": (0.25, -3),
        "triangle_multiplication_incoming.dropout": (0.25, -3),
        "triangle_attention_starting.dropout": (0.25, -3),
        "triangle_attention_ending.dropout": (0.25, -2),
    }


@pytest.mark.parametrize(("init", "scale"), [("default", 1.0), ("relu", 2.0)])
def test_weights_are_truncated_normal_with_the_right_variance(init: str, scale: float) -> None:
    torch.manual_seed(0)
    layer = Linear(400, 500, init=init)  # type: ignore[arg-type]
    std = math.sqrt(scale / 400)
    assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
    assert layer.weight.abs().max().item() <= 2 * std / 0.8796 + 1e-6
    assert not layer.bias.any()


def test_glorot_counts_heads_as_the_official_initialiser() -> None:
    torch.manual_seed(0)
    layer = Linear(256, 256, bias=False, init="glorot", heads=8)
    assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (256 * (8 + 32))), rel=0.01)


def test_a_fresh_block_is_the_identity() -> None:
    """Every residual branch ends in zeros, so training starts from the identity."""
    torch.manual_seed(0)
    block = EvoformerBlock(oracle_config().model.embeddings_and_evoformer.evoformer, 32, 24).eval()
    msa, pair = torch.randn(5, 6, 32), torch.randn(6, 6, 24)
    out = block(msa, pair, torch.ones(5, 6), torch.ones(6, 6))
    torch.testing.assert_close(out[0], msa)
    torch.testing.assert_close(out[1], pair)


def _loss(model: AlphaFold, features: dict[str, torch.Tensor]) -> torch.Tensor:
    result = model(features)
    last = {key: value[-1] for key, value in features.items()}
    return alphafold_loss(result, last, model.config)[0]


def test_every_parameter_gets_a_gradient() -> None:
    model = random_model(oracle_config()).train()
    torch.manual_seed(1)
    _loss(model, oracle_features()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # The last block's update of all MSA rows but the masked positions reaches the loss; every parameter matters.
    assert without == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_checkpointing_gives_the_same_gradients() -> None:
    """Recomputed blocks draw the same dropout."""
    gradients = []
    for enabled in (False, True):
        model = random_model(shallow_config()).train()
        model.set_checkpointing(enabled)
        torch.manual_seed(1)
        _loss(model, oracle_features()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_only_the_last_cycle_records_gradients() -> None:
    model = random_model(shallow_config())
    features = oracle_features()
    first = {key: value[:1] for key, value in features.items()}
    calls: list[bool] = []
    model.evoformer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model(features)
    assert calls == [False, True]
    model(first, num_recycles=0)
    assert calls == [False, True, True]


def test_no_gradient_through_orientations_between_layers() -> None:
    """Supplement, Algorithm 20 line 20: with the stop, early layers get their signal through positions alone."""
    model = random_model(oracle_config(), dtype=torch.float64)
    module = model.structure_module
    single = torch.randn(6, 40).double()
    pair = torch.randn(6, 6, 24).double()
    aatype, mask = torch.arange(6), torch.ones(6).double()

    def rotations_depend(layers: int) -> bool:
        module.layers = layers
        seen: list[torch.Tensor] = []
        hook = module.attention.register_forward_pre_hook(lambda _, args: seen.append(args[2].rotation))
        module(single, pair, aatype, mask)
        hook.remove()
        return any(rotation.requires_grad for rotation in seen)

    assert not rotations_depend(4)
