"""One call stores a vision transformer, a language model or the Evoformer in 8 bits, and says what it left out."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

import fastfold
from examples.gpt.gpt import GPT, GPTConfig
from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import precision_of, set_precision
from fastfold.evoformer.quantization.any_module import QuantizationReport, quantize, stored_bytes
from fastfold.evoformer.transition import Transition
from fastfold.kernels.cpu import linear
from fastfold.kernels.cpu.int8_layers import Int8Embedding, Int8Linear
from fastfold.parallel.alphafold.workload import dummy_features, one_block_config
from tests.helpers.networks import random_model


class ViT(nn.Module):
    """Patches of a picture, two encoder layers, and a class."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.place = nn.Parameter(torch.randn(17, width) * 0.02)
        self.first = nn.Parameter(torch.zeros(1, width))
        one = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.encoder(x)[:, 0])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(64, 128), b=nn.ReLU(), c=nn.Linear(128, 8)))


def test_a_vision_transformer_keeps_its_classes_in_a_fraction_of_the_memory() -> None:
    torch.manual_seed(0)
    model = ViT().eval()
    pictures = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        expected = model(pictures)
    report = quantize(model, "int8", [pictures])
    with torch.no_grad():
        found = model(pictures)
    error = float((found - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.05
    assert report.errors == {"": pytest.approx(error, rel=1e-3)}
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert report.bytes_after == stored_bytes(model) < 0.55 * report.bytes_before
    assert {"encoder.layers.0.linear1", "encoder.layers.1.self_attn.out_proj", "head"} <= set(
        report.quantized
    )
    assert report.refused["patches"] == "Conv2d is neither a linear layer nor an embedding"
    assert "MultiheadAttention is neither" in report.refused["encoder.layers.0.self_attn"]
    assert report.refused["(the module)"] == "its own parameters are not a layer's"


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_predicts_the_same_and_shared_weights_stay_shared(tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=512, layers=2, width=128, tied=tied))
    tokens = torch.randint(0, 512, (2, 32))
    with torch.no_grad():
        expected = model(tokens)
    report = quantize(model, batches=[(tokens,)])
    with torch.no_grad():
        found = model(tokens)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert isinstance(model.tokens, Int8Embedding)
    assert isinstance(model.head, Int8Linear)
    assert (model.tokens.stored is model.head.stored) is tied
    assert report.bytes_after < 0.28 * report.bytes_before
    assert {name for name in report.refused if "norm" not in name} == set()
    assert model.training


@pytest.mark.slow
def test_models_of_transformers_are_stored() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    report = quantize(gpt, batches=[{"input_ids": torch.randint(0, 512, (2, 32)), "use_cache": False}])
    assert report.bytes_after < 0.3 * report.bytes_before
    assert 0 < report.errors["['logits']"] < 0.05
    assert gpt.transformer.h[0].attn.c_attn.weight.shape == (128, 384)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    ).eval()
    report = quantize(vit, batches=[{"pixel_values": torch.randn(2, 3, 32, 32)}])
    assert report.bytes_after < 0.35 * report.bytes_before
    assert 0 < report.errors["['logits']"] < 0.05


def test_a_layer_with_a_transposed_weight_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(64, 16)), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    model = nn.Sequential(Conv1D())
    report = quantize(model, batches=[torch.randn(5, 64)])
    assert report.quantized == ("0",)
    assert report.errors[""] < 0.02
    assert model[0].weight.shape == (64, 16)


def test_an_evoformer_block_multiplies_in_the_existing_8_bits() -> None:
    torch.manual_seed(0)
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer
    block = EvoformerBlock(config, 64, 32, zero_init=False).eval()
    batch = {"msa": torch.randn(4, 12, 64), "pair": torch.randn(12, 12, 32)}
    batch |= {"msa_mask": torch.ones(4, 12), "pair_mask": torch.ones(12, 12)}
    inputs = {name: x.clone() for name, x in batch.items()}
    report = quantize(copy.deepcopy(block), "int8", [batch])
    assert len(report.errors) == 2
    assert all(1e-5 < error < 0.02 for error in report.errors.values())
    assert report.bytes_after < 0.6 * report.bytes_before
    assert all(torch.equal(batch[name], x) for name, x in inputs.items())
    quantize(block)
    with pytest.raises(ConfigError, match="for inference only"):
        block(**batch)


def test_a_copy_has_weights_of_its_own() -> None:
    torch.manual_seed(0)
    transition = Transition(ConfigDict({"num_intermediate_factor": 4}), 32, zero_init=False)
    quantize(transition)
    other = copy.deepcopy(transition)
    other.output.stored.scale.zero_()
    x = torch.randn(3, 4, 32)
    with torch.no_grad():
        assert torch.equal(other(x), x)
        assert not torch.equal(transition(x), x)


def test_a_network_keeps_structure_module_and_heads_and_is_as_near_as_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a processor without units for bfloat16, where the precision has 8 bits too."""
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    config = one_block_config(model_config("model_1_ptm"))
    network = random_model(config)
    features = {name: value[None] for name, value in dummy_features(config, 6, 3, 4).items()}

    def positions(model: AlphaFold) -> Tensor:
        with torch.no_grad():
            return model(features, 0)["structure_module"]["final_atom_positions"]

    exact = positions(network)
    by_precision = positions(set_precision(copy.deepcopy(network), "int8", least_work=0))
    report = quantize(network)
    found = positions(network)
    assert precision_of(network) == "int8"
    allowed = 3 * float((by_precision - exact).norm())
    assert 0 < float((found - exact).norm()) < allowed
    kept = [name for name in report.refused if name.startswith(("structure_module.", "heads."))]
    assert len(kept) > 20
    assert {report.refused[name] for name in kept} == {"structure module and heads stay in float32"}
    assert not any(name.startswith(("structure_module", "heads")) for name in report.quantized)


def test_layers_with_large_errors_stay_and_are_named() -> None:
    model = mlp()
    x = torch.randn(16, 64)
    x[:, 0] = 3e3  # an outlier leaves few steps to the other channels
    with torch.no_grad():
        model.a.weight[:, 0] = 0
    report = quantize(model, batches=[x])
    assert report.layer_errors["a"] > 0.05
    assert report.refused == {
        "a": f"its output has an error of {report.layer_errors['a']:.1%}, more than 5.0%"
    }
    assert report.quantized == ("c",)
    assert report.errors[""] < 0.02
    assert "not in 8 bits: a: its output has an error" in str(report)


def test_values_that_are_not_finite_are_not_overlooked() -> None:
    x = torch.randn(2, 64)
    x[0, 0] = float("nan")
    report = quantize(mlp(), batches=[torch.randn(2, 64), x, torch.randn(2, 64)])
    assert set(report.refused) == {"a", "c"}


def test_layers_are_left_out_by_name_type_and_sharing() -> None:
    class Scaled(nn.Linear):
        pass

    model = mlp()
    model.add_module("scaled", Scaled(8, 8))
    model.add_module("inner", nn.Sequential(nn.Linear(8, 8)))
    model.add_module("conv", nn.Conv1d(64, 128, 1))
    model.conv.weight = model.a.weight  # type: ignore[assignment]
    report = quantize(model, skip=["inner"])
    assert report.quantized == ("c",)
    assert report.refused["inner.0"] == "left out by skip"
    assert report.refused["scaled"] == "Scaled may compute something else than nn.Linear"
    assert report.refused["a"] == "it shares its weight with conv"


def test_a_model_is_frozen_and_loads_what_it_saves() -> None:
    model, other = mlp(), mlp()
    quantize(model)
    nn.init.zeros_(other.a.weight)
    quantize(other)
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 64)
    assert not model(x).requires_grad
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int4"}, "expected 'int8', found 'int4'"),
        ({"skip": ["x"]}, "skip has 'x'"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"model": nn.Linear(2, 2)}, "wrap it in nn.Sequential"),
        ({"model": "mini"}, "expected a torch.nn.Module, found str"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(**{"model": mlp(), **given})  # type: ignore[arg-type]


def test_a_second_call_and_a_failing_batch_change_nothing() -> None:
    model = mlp()
    with pytest.raises(RuntimeError):
        quantize(model, batches=[torch.randn(2, 3)])
    assert type(model.a) is nn.Linear
    assert model.training
    assert not model.a._forward_hooks
    assert all(p.requires_grad for p in model.parameters())
    assert fastfold.quantize is quantize
    quantize(model)
    with pytest.raises(ConfigError, match="in 8 bits already"):
        quantize(model)


def test_a_report_lists_refusals_by_reason() -> None:
    refused = {f"norm{k}": "a norm" for k in range(25)} | {"conv": "a convolution"}
    report = QuantizationReport(4 << 20, 1 << 20, ("a",), refused, {"": 0.012})
    assert str(report).splitlines() == [
        "1 layers in 8 bits: 4.0 MiB of parameters before, 1.0 MiB after",
        "output (the only one): error 1.20%",
        "not in 8 bits: norm0 and 24 more: a norm",
        "not in 8 bits: conv: a convolution",
    ]
