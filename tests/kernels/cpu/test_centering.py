"""What positions have in common is taken out of products before the rounding, and nothing else is changed by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.kernels.cpu import linear
from fastfold.kernels.cpu.linear import (
    SAMPLE,
    Products,
    centered,
    estimate,
    mean_of,
    reduced_products,
    sample,
)
from tests.kernels.test_operators import case_of

EPS = 1e-5


def _grid(*shape: int) -> Tensor:
    """Each position holds its own index, ``[*, axes]``."""
    return torch.stack(torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij"), -1)


@pytest.mark.parametrize("shape", [(256, 256), (128, 37), (3, 5000), (70_000,)])
def test_a_sample_is_spread_over_every_axis(shape: tuple[int, ...]) -> None:
    """Of 256 positions, with no axis in step: no eighth of an axis has more than a fourth of them too many."""
    found = sample(_grid(*shape))
    assert len(found.unique(dim=0)) == len(found) == SAMPLE
    for axis, length in enumerate(shape):
        eighths = torch.bincount(found[:, axis] * 8 // length, minlength=8)
        if length >= 8:
            assert float(eighths.max()) <= 1.25 * SAMPLE / 8


def test_a_sample_of_a_small_tensor_is_an_eighth_of_it() -> None:
    assert [len(sample(torch.zeros(*shape, 4))) for shape in ((8, 8), (1, 3), (0, 5), (2, 3, 100))] == [
        *(8, 1, 0, 75)
    ]


def test_a_sample_is_the_same_for_the_same_positions_whatever_their_strides() -> None:
    x = torch.randn(40, 50, 4)
    turned = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not turned.is_contiguous()
    assert torch.equal(sample(turned), sample(x))


def test_what_is_not_finite_is_no_part_of_a_mean() -> None:
    x = torch.tensor([[1.0, 2.0, torch.nan], [torch.nan, 4.0, torch.nan], [3.0, torch.inf, torch.nan]])
    assert mean_of(x).tolist() == [2.0, 0.0, 0.0]
    assert mean_of(x[:0]).tolist() == [0.0, 0.0, 0.0]


def test_a_mean_of_finite_values_is_that_of_numpy() -> None:
    x = torch.randn(300, 7) + 5
    torch.testing.assert_close(mean_of(x), torch.from_numpy(x.numpy().mean(0, dtype="float64")).float())


@pytest.mark.parametrize(("units", "error"), [(True, 4e-3), (False, 1e-6)])
def test_an_estimate_is_a_product_of_the_precision_of_the_units(
    units: bool, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if units and not linear.multiplies_bfloat16():
        pytest.skip("this processor has no units for bfloat16")
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: units)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(50, 64), torch.randn(24, 64), torch.randn(24)
    for given in (bias, None):
        exact = x.double() @ weight.double().T + (0 if given is None else given.double())
        assert float((estimate(x, weight, given) - exact).norm() / exact.norm()) < error


def _layer(
    n: int = 512, c: int = 48, outputs: int = 24
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Data with a large common part, scale and shift of a norm, weight and bias."""
    torch.manual_seed(0)
    x = torch.randn(n, c) + 3 * torch.randn(c)
    return x, (torch.randn(c), torch.randn(c)), torch.randn(outputs, c), torch.randn(outputs)


def _product(x: Tensor, norm: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    found = torch.nn.functional.layer_norm(x, x.shape[-1:], *norm, EPS)
    return torch.nn.functional.linear(found, weight, bias)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_centred_product_is_the_same_one_of_smaller_data(with_bias: bool) -> None:
    x, norm, weight, bias = _layer()
    given = bias if with_bias else None
    with reduced_products("bf16"):
        moved, moved_bias = centered(x, norm, EPS, weight, given)
    exact = _product(
        x.double(),
        (norm[0].double(), norm[1].double()),
        weight.double(),
        None if given is None else bias.double(),
    )
    assert float((_product(x, moved, weight, moved_bias) - exact).norm() / exact.norm()) < 1e-6
    before, after = (torch.nn.functional.layer_norm(x, x.shape[-1:], *of, EPS) for of in (norm, moved))
    assert float(after.norm()) < 0.5 * float(before.norm())


def test_nothing_is_moved_where_products_are_exact() -> None:
    x, norm, weight, bias = _layer()
    found = centered(x, norm, EPS, weight, bias)
    assert found == (norm, bias)
    assert found[0] is norm
    assert found[1] is bias
    with reduced_products("int8"):
        found = centered(x.double(), norm, EPS, weight.double(), bias)
    assert found[0] is norm


OPERATORS = ("transition", "gated_attention", "triangle_multiplication_outgoing")


def _with_a_common_part(name: str, n: int, size: float = 6.0) -> tuple[dict[str, Any], Tensor]:
    """Inputs of an operator whose positions have much in common, and its output in float64."""
    case = case_of(name, n)
    main = "z" if name.startswith("triangle") else "x"
    torch.manual_seed(1)
    common = size * torch.randn(case.inputs[main].shape[-1], dtype=torch.float64)
    inputs = case.inputs | {main: case.inputs[main] + common}
    exact = case.definition(**inputs)
    return {k: v.float() if isinstance(v, Tensor) else v for k, v in inputs.items()}, exact


@pytest.mark.parametrize("products", ["bf16", "int8"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_lose_no_more_to_rounding_than_without_a_common_part(
    name: str, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the mean they would; what is rounded between their products is not centred."""

    def error(size: float = 6.0) -> float:
        inputs, exact = _with_a_common_part(name, 33, size)
        with torch.no_grad(), reduced_products(products):
            found = case_of(name, 33).operator(**inputs)
        return float((found - exact).norm() / exact.norm())

    less = error()
    assert less < 1.05 * error(0.0)
    monkeypatch.setattr(linear, "SAMPLE", 0)
    assert less < (0.7 if name == "transition" else 0.8) * error()


@pytest.mark.parametrize("products", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["transition", "gated_attention"])
def test_a_row_that_is_not_finite_stays_alone(name: str, products: Products) -> None:
    """Although a sample is taken of all rows."""
    if name == "transition" and torch.cpu._is_amx_tile_supported():
        pytest.skip(
            "with AMX, oneDNN multiplies what follows a narrow row by zeros, and NaN times zero is NaN"
        )
    inputs, _ = _with_a_common_part(name, 33)
    row = (1,) * (inputs["x"].dim() - (2 if name == "gated_attention" else 1))
    inputs["x"][row] = torch.nan
    with torch.no_grad(), reduced_products(products):
        found = case_of(name, 33).operator(**inputs)
    assert not found[row].isfinite().any()
    found[row] = 0
    assert found.isfinite().all()
