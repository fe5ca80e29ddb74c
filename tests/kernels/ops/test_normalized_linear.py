"""A linear layer after a normalisation, in one pass where data are multiplied in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels.cpu import linear
from fastfold.kernels.cpu.linear import Products, reduced_products
from fastfold.kernels.ops.layer_norm.op import keeps_bfloat16, normalized_linear


def _layer() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    norm = 1 + 0.1 * torch.randn(64), torch.randn(64)
    return torch.randn(5, 300, 64) + 6 * torch.randn(64), *norm, torch.randn(24, 64), torch.randn(24)


def _exact(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = torch.nn.functional.layer_norm(x.double(), [64], norm_weight.double(), norm_bias.double())
    return normed @ weight.double().T + bias.double()


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("products", ["bf16", "int8"])
@pytest.mark.parametrize("units", [True, False])
def test_float32_data_are_projected_in_the_precision_of_products(
    products: Products, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if units and not linear.multiplies_bfloat16():
        pytest.skip("this processor has no units for bfloat16")
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: units)
    x, *layer = _layer()
    exact = _exact(x, *layer)
    plain = normalized_linear(x, *layer)
    normed = kernels.layer_norm(x, layer[0], layer[1])
    assert torch.equal(plain, torch.nn.functional.linear(normed, layer[2], layer[3]))
    with torch.no_grad(), reduced_products(products):
        found = normalized_linear(x, *layer)
        columns = normalized_linear(x.transpose(0, 1), *layer)
    if products == "int8" and not units:
        assert torch.equal(found, plain)
        return
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(columns.transpose(0, 1), found, rtol=1e-2, atol=1e-2)
    assert 5e-4 < _error(found, exact) < 3e-3
    monkeypatch.setattr(linear, "SAMPLE", 0)
    with torch.no_grad(), reduced_products(products):
        assert _error(found, exact) < 0.7 * _error(normalized_linear(x, *layer), exact)


def test_gradients_are_recorded_as_of_the_layers() -> None:
    x, *layer = _layer()
    x.requires_grad_()
    with reduced_products("bf16"):
        assert keeps_bfloat16(x)
        normalized_linear(x, *layer).sum().backward()
    assert x.grad is not None
    assert not keeps_bfloat16(x)


def test_bfloat16_data_are_rounded_between_the_steps_alone() -> None:
    x, *layer = _layer()
    narrow = [x.bfloat16(), *layer[:2], *(t.bfloat16() for t in layer[2:])]
    with torch.no_grad():
        found = normalized_linear(*narrow)
    assert found.dtype == torch.bfloat16
    assert 5e-4 < _error(found, _exact(*narrow)) < 6e-3


def test_parameters_in_float32_serve_bfloat16_data() -> None:
    """As under autocast."""
    x, *layer = _layer()
    with torch.no_grad():
        found = normalized_linear(x.bfloat16(), *layer)
    assert found.dtype == torch.bfloat16
    assert 5e-4 < _error(found, _exact(x.bfloat16(), *layer)) < 6e-3
