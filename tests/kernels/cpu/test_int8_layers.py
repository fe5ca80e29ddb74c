"""Layers in 8 bits: rounding errors of the expected size, any shape, and no silent gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.kernels.cpu.int8_layers import Int8Embedding, Int8Linear, Int8Weight, StoredLinear, refusal
from fastfold.kernels.cpu.linear import max_inputs


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def layer(k: int = 64, n: int = 32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n)


@pytest.mark.parametrize(("words", "largest"), [(1, 0.01), (2, 0.0004)])
def test_a_matrix_is_near_the_original_whatever_the_scale_of_a_row(words: int, largest: float):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-8
    weight[4] *= 1e8
    weight[5] = 0
    stored = Int8Weight(weight, words)
    assert (stored.words.dtype, stored.words.numel()) == (torch.int8, words * weight.numel())
    for row in (0, 3, 4):
        assert relative(stored.matrix()[row], weight[row]) < largest
    assert torch.equal(stored.matrix()[5], torch.zeros(64))


def test_storing_a_stored_matrix_again_changes_nothing():
    once = Int8Weight(layer().weight).matrix()
    torch.testing.assert_close(Int8Weight(once).matrix(), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 5, 64), (0, 64), (2, 0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_near_for_any_shape(shape: tuple[int, ...], dtype: torch.dtype):
    plain = layer().to(dtype)
    x = torch.randn(shape).to(dtype)
    with torch.no_grad():
        found, expected = Int8Linear(Int8Weight(plain.weight), plain.bias)(x), plain(x)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    if expected.numel():
        assert relative(found.float(), expected.float()) < 0.03


def test_positions_have_steps_of_their_own_and_not_finite_ones_stay_alone():
    plain = layer()
    x = torch.randn(4, 64)
    x[0] *= 1e6
    x[2, 5] = float("nan")
    x[3, 5] = float("inf")
    with torch.no_grad():
        found, expected = Int8Linear(Int8Weight(plain.weight), None)(x), x @ plain.weight.t()
    assert relative(found[1], expected[1]) < 0.03
    assert not found[2:].isfinite().any()


def test_a_stored_layer_multiplies_exactly_by_its_weight():
    plain, x = layer(), torch.randn(5, 64)
    stored = StoredLinear(Int8Weight(plain.weight, 2), plain.bias)
    with torch.no_grad():
        torch.testing.assert_close(stored(x), nn.functional.linear(x, stored.weight, plain.bias))


def test_rows_of_an_embedding_are_near_and_may_be_shared_with_a_product():
    plain = nn.Embedding(10, 64)
    shared = Int8Weight(plain.weight)
    index = torch.tensor([[1, 2], [9, 0]])
    found = Int8Embedding(shared)(index)
    assert relative(found, plain(index)) < 0.01
    assert torch.equal(found, shared.matrix()[index])


def test_gradients_are_refused():
    product = Int8Linear(Int8Weight(layer().weight), None)
    x = torch.randn(2, 64, requires_grad=True)
    for one in (product, StoredLinear(product.stored, None)):
        with pytest.raises(ConfigError, match="for inference only"):
            one(x)
        with torch.no_grad():
            one(x)


def test_casts_keep_words_and_scales():
    stored = Int8Weight(layer().weight)
    cast = copy.deepcopy(stored).to(torch.bfloat16)
    assert cast.scale.dtype == torch.float32
    assert torch.equal(cast.matrix(), stored.matrix())
    loaded = Int8Weight(torch.zeros(32, 64))
    loaded.load_state_dict(stored.state_dict())
    assert torch.equal(loaded.matrix(), stored.matrix())


def test_layers_that_cannot_be_stored_say_why():
    assert refusal(layer()) == ""
    broken = layer()
    broken.weight.data[0, 0] = float("nan")
    assert "not finite" in refusal(broken)
    assert "sums of more than" in refusal(nn.Linear(max_inputs() + 1, 1))
    assert "max_norm" in refusal(nn.Embedding(3, 4, max_norm=1.0))
    hooked = layer()
    hooked.register_forward_hook(lambda *_: None)
    assert "hooks" in refusal(hooked)
    computed = layer()
    weight = computed.weight.detach()
    del computed.weight
    computed.weight = weight  # type: ignore[assignment]
    assert "computed" in refusal(computed)
    with torch.device("meta"):
        assert "on meta" in refusal(nn.Linear(2, 2))
