"""Products with weights in less than float32: as exact as they say, and only where they are asked for."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu import linear
from fastfold.kernels.cpu import products as cpu_products
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    Products,
    add_product,
    add_products,
    batched_product,
    product_dtype,
    reduced_products,
)
from fastfold.kernels.cpu.products import exact_products
from tests.helpers import named_operators
from tests.kernels.test_operators import case_of

Kind = Literal["bf16", "int8", "int8x2"]
"""bfloat16, or 8 bits with weights in one or in two words."""

ERRORS: dict[Kind, tuple[float, float]] = {
    "bf16": (1e-3, 6e-3),
    "int8": (5e-3, 1.5e-2),
    "int8x2": (2e-3, 9e-3),
}
"""Relative errors of a product of normal numbers: less would not be that precision, more would be a mistake."""


def _made(n: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n + inputs)
    return torch.randn(n, inputs), torch.randn(outputs, inputs), torch.randn(outputs)


@pytest.fixture(params=[True, False], ids=["with units", "without"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor is taken for one that multiplies bfloat16."""
    if request.param and not cpu_products.multiplies_bfloat16():
        pytest.skip("this processor has no units for bfloat16")
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: request.param)
    return bool(request.param)


@pytest.fixture
def _no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is taken for one without units for bfloat16, which has weights in two words."""
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)


def _layer(kind: Kind, weight: Tensor, bias: Tensor | None = None, **options: Any) -> PreparedLinear:
    with reduced_products("bf16" if kind == "bf16" else "int8"):
        return PreparedLinear(weight, bias, least="int8" if kind == "int8" else "int8x2", **options)


def _product(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, *, positive: bool = False) -> Tensor:
    """A product, after it was found to be the same however it is asked for."""
    layer = _layer(kind, weight, bias, positive=positive)
    found = layer(x, "out", Scratch())
    assert found.dtype == x.dtype
    if layer.products == "bf16":
        narrow = layer(x.bfloat16(), "narrow", Scratch(dtype=torch.bfloat16))
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.to(x.dtype), found, rtol=0, atol=0, equal_nan=True)
    rows, columns = x.new_empty(len(x), len(weight)), x.new_empty(len(weight), len(x)).T
    assert layer.fill(rows, x, Scratch()) is rows
    torch.testing.assert_close(rows, found, rtol=0, atol=0, equal_nan=True)
    assert layer.fill(columns, x, Scratch()) is columns
    largest = float(found[found.isfinite()].abs().max())
    torch.testing.assert_close(columns, found, rtol=1e-6, atol=1e-6 * largest, equal_nan=True)
    return found


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("n", "inputs", "outputs"), [(37, 8, 33), (37, 129, 65), (256, 1024, 128)])
def test_a_product_is_as_exact_as_its_precision(
    kind: Kind, with_bias: bool, n: int, inputs: int, outputs: int, units: bool
) -> None:
    x, weight, bias = _made(n, inputs, outputs)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    # Where the processor has units for bfloat16, that takes the place of 8 bits.
    least, most = ERRORS["bf16" if units else kind]
    assert least < _error(_product(kind, x, weight, bias if with_bias else None), exact) < most


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_what_positions_have_in_common_is_multiplied_by_the_weights_as_they_are(kind: Kind) -> None:
    """Rounded weights make an error that all positions share, unless the mean of the data is known."""
    x, weight, bias = _made(256, 129, 65)
    x = (x + 10 * torch.rand(129)).relu()
    exact = x.double() @ weight.double().T + bias.double()

    def shared(**options: Any) -> float:
        error = _layer(kind, weight, bias, **options)(x, "out", Scratch()) - exact
        return float(error.mean(0).norm())

    plain = shared()
    assert shared(mean=torch.zeros(129)) == plain
    assert shared(mean=x.mean(0)) < plain / 5


@pytest.mark.usefixtures("_no_units")
@pytest.mark.parametrize(("positive", "largest"), [(False, 127), (True, 255)])
def test_whole_numbers_of_eight_bits_are_multiplied_exactly(positive: bool, largest: int) -> None:
    """The largest sums that there are, the second word of the weights, and data that need their sign's bit."""
    x = torch.full((3, linear.max_inputs(positive)), float(largest))
    x[2, 1::2] = 0.0
    weight = torch.stack([torch.full_like(x[0], 127.0), torch.full_like(x[0], -127.0)])
    weight[0, 1:] -= 1 / 32  # one step of the second word
    exact = (x.double() @ weight.double().T).float()
    found = _product("int8x2", x, weight, None, positive=positive)
    torch.testing.assert_close(found, exact, rtol=2**-23, atol=0.0)


@pytest.mark.usefixtures("_no_units")
@pytest.mark.parametrize("positive", [False, True])
def test_sums_that_int32_cannot_hold_are_made_in_float32(positive: bool) -> None:
    x, weight, bias = _made(2, linear.max_inputs(positive) + 1, 2)
    found = _product("int8x2", x.abs(), weight, bias, positive=positive)
    assert torch.equal(found, torch.addmm(bias, x.abs(), weight.T))


@pytest.mark.usefixtures("_no_units")
def test_data_without_a_sign_have_steps_of_half_the_width() -> None:
    x, weight, _ = _made(256, 512, 64)
    x.relu_()
    exact = x.double() @ weight.double().T
    signed, unsigned = (_error(_product("int8x2", x, weight, None, positive=p), exact) for p in (False, True))
    assert 1.8 < signed / unsigned < 2.2


@pytest.mark.parametrize("products", ["bf16", "int8"])
def test_an_exact_product_is_that_of_float32(products: Products) -> None:
    x, weight, bias = _made(37, 16, 8)
    with reduced_products(products):
        layer = PreparedLinear(weight, bias, least="fp32")
    assert layer.products is None
    assert torch.equal(layer(x, "out", Scratch()), torch.addmm(bias, x, weight.T))


def test_what_8_bits_are_too_coarse_for_is_in_bfloat16_if_the_processor_multiplies_that(units: bool) -> None:
    """And so are data that are multiplied by each other; a product in bfloat16 that was asked for stays one."""
    x, weight, bias = _made(37, 16, 8)
    with reduced_products("int8"):
        assert PreparedLinear(weight, bias, least="bf16").products == ("bf16" if units else None)
        assert product_dtype(x) == (torch.bfloat16 if units else torch.float32)
        assert product_dtype(x.double()) == torch.float64
    with reduced_products("bf16"):
        assert PreparedLinear(weight, bias, least="bf16").products == "bf16"
        assert product_dtype(Scratch()) == torch.bfloat16
    assert product_dtype(x) == torch.float32


def test_8_bits_are_used_only_where_the_processor_does_not_multiply_bfloat16(units: bool) -> None:
    with reduced_products("int8"):
        for least in ("int8", "int8x2"):
            assert PreparedLinear(torch.randn(8, 1024), least=least).products == ("bf16" if units else "int8")
    assert PreparedLinear(torch.randn(8, 16)).products is None


def test_a_relu_within_a_product_may_hide_nan_but_not_for_weights_that_make_it(units: bool) -> None:
    x, weight, bias = _made(37, 32, 8)
    narrow = Scratch(dtype=torch.bfloat16)
    with reduced_products("bf16"):
        plain, within = (PreparedLinear(weight, bias, relu=True, keep_nan=keep) for keep in (True, False))
        weight[3, 5] = torch.nan
        broken = PreparedLinear(weight, bias, relu=True, keep_nan=False)
    rounded = x.bfloat16()
    assert torch.equal(within(rounded, "out", narrow), plain(rounded, "out", narrow))
    assert broken(rounded, "out", narrow).isnan().any(0).tolist() == [i == 3 for i in range(8)]


@pytest.mark.parametrize("requested", [True, False], ids=["products", "data"])
def test_a_sigmoid_and_a_gate_follow_a_product_in_bfloat16(requested: bool, units: bool) -> None:
    """Whether only products are made in bfloat16, or the weights are in bfloat16 too."""
    x, weight, bias = _made(300, 32, 8)
    rounded, narrow = x.bfloat16(), Scratch(dtype=torch.bfloat16)
    with reduced_products("bf16") if requested else nullcontext():
        weight = weight if requested else weight.bfloat16()
        gate, layer = PreparedLinear(weight, bias, sigmoid=True), PreparedLinear(weight, bias)
        opened = gate(rounded, "gate", narrow)
        exact = rounded.double() @ weight.bfloat16().double().T + bias.double()
        assert 1e-4 < _error(opened, exact.sigmoid()) < 3e-3
        product = layer.gated(rounded, opened.clone(), narrow)
    assert 1e-4 < _error(product, exact * opened.double()) < 3e-3


@pytest.mark.parametrize("products", [None, "int8"])
def test_a_sigmoid_follows_a_product_of_float32_data(products: Products | None, units: bool) -> None:
    x, weight, bias = _made(300, 32, 8)
    with reduced_products(products) if products else nullcontext():
        opened = PreparedLinear(weight, bias, sigmoid=True)(x, "gate", Scratch())
    exact = (x.double() @ weight.double().T + bias.double()).sigmoid()
    assert _error(opened, exact) < (1e-2 if products else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_added_to_a_residual_of_any_strides(dtype: torch.dtype, units: bool) -> None:
    """In bfloat16 by the product itself, which rounds once."""
    x, weight, bias = (t.to(dtype) for t in _made(6, 32, 8))
    residual = torch.randn(3, 2, 8).to(dtype).transpose(0, 1)
    layer, scratch = PreparedLinear(weight, bias), Scratch(dtype=dtype)
    exact = residual.double() + (x.double() @ weight.double().T + bias.double()).view(2, 3, 8)
    out, dropout = torch.empty(2, 3, 8, dtype=dtype), torch.full((2, 3, 8), 2.0, dtype=dtype)
    layer.update(out, x, residual, None, scratch)
    assert _error(out, exact) < (1e-6 if dtype == torch.float32 else 2.2e-3 if units else 4e-3)
    layer.update(out, x, residual, dropout, scratch)
    assert _error(out, 2 * exact - residual) < (1e-6 if dtype == torch.float32 else 4e-3)
    layer.update(out, x, None, None, scratch)
    assert _error(out, exact - residual) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("products", [None, "bf16", "int8"])
@pytest.mark.parametrize("onednn", [True, False])
def test_a_relu_is_put_behind_a_product(
    products: Products | None, onednn: bool, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: onednn)
    x, weight, bias = _made(37, 16, 8)
    with reduced_products(products) if products else nullcontext(), exact_products(torch.device("cpu")):
        plain, layer = (PreparedLinear(weight, bias, relu=relu, least="int8") for relu in (False, True))
    x[0, 0] = torch.nan
    expected = plain(x, "out", Scratch()).relu()
    assert expected[0].isnan().all()
    assert 0 < int((expected == 0).sum()) < expected.numel()
    same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    same(layer(x, "out", Scratch()), expected)
    columns = x.new_empty(8, 37).T
    expected_columns = plain.fill(torch.empty_like(columns), x, Scratch()).relu()
    same(layer.fill(columns, x, Scratch()), expected_columns)


@pytest.mark.usefixtures("_no_units")
@pytest.mark.parametrize("kind", ["int8", "int8x2"])
def test_more_sums_than_a_buffer_has_are_made_in_blocks_to_the_same_bits(kind: Kind) -> None:
    x, weight, bias = _made(1100, 8, 1024)
    found = _product(kind, x, weight, bias)
    parts = [_product(kind, part, weight, bias) for part in x.split(300)]
    assert torch.equal(found, torch.cat(parts))


def test_data_in_bfloat16_are_multiplied_as_they_are(units: bool) -> None:
    x, weight, bias = _made(37, 16, 8)
    with reduced_products("bf16"):
        layer = PreparedLinear(weight, bias)
    rounded = x.bfloat16()
    assert torch.equal(layer(rounded, "out", Scratch()), layer(rounded.float(), "out", Scratch()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("kind", "positive"), [("bf16", False), ("int8", False), ("int8x2", True)])
def test_what_is_not_finite_stays_visible_in_its_row_alone(
    kind: Kind, positive: bool, bad: float, units: bool
) -> None:
    x, weight, bias = _made(3, 16, 4)
    x.abs_()[1, 5] = bad
    found = _product(kind, x, weight, bias, positive=positive)
    assert found.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize(("kind", "positive"), [("bf16", False), ("int8", False), ("int8x2", True)])
def test_an_empty_row_gives_the_bias(kind: Kind, positive: bool, units: bool) -> None:
    _, weight, bias = _made(1, 16, 4)
    bias = bias.bfloat16().float()
    assert torch.equal(_product(kind, torch.zeros(1, 16), weight, bias, positive=positive)[0], bias)


@pytest.mark.parametrize("products", ["bf16", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "transition",
        "gated_attention",
        "outer_product_mean",
        "triangle_multiplication_outgoing",
        "triangle_multiplication_incoming",
    ],
)
def test_operators_use_it_for_every_weight_but_a_few(
    name: str, products: Products, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each differs from float32 by the rounding of its products, and float64 data are left alone.

    Where 8 bits are all that the processor has, the projection and the gate of the triangle product are exact, and so
    is the projection of what attention gives.
    """
    case = case_of(name, 33)
    if name == "outer_product_mean":  # of more sequences, so that the weight is not folded into one side
        sides = ("left", "right", "left_mask", "right_mask")
        case.inputs.update({side: torch.cat([case.inputs[side]] * 4) for side in sides})
    small = {k: v.float() if isinstance(v, Tensor) else v for k, v in case.inputs.items()}
    made: list[PreparedLinear] = []
    create = PreparedLinear.__init__

    def counted(self: PreparedLinear, *arguments: Tensor, **options: Any) -> None:
        create(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(PreparedLinear, "__init__", counted)
    exact = case.definition(**case.inputs)
    with torch.no_grad():
        plain = case.operator(**small)
        with reduced_products(products):
            found = case.operator(**small)
            double = case.operator(**case.inputs)
    assert all(one.products is None for one in made[: len(made) // 3])
    used = [one for one in made[len(made) // 3 :] if one.products is not None]
    # Both factors of so small a triangle product are made of all channels at once.
    bfloat16 = {"transition": 2, "gated_attention": 2, "outer_product_mean": 1}
    without = {"transition": 2, "gated_attention": 1, "outer_product_mean": 1}
    assert len(used) == (bfloat16.get(name, 3) if products == "bf16" or units else without.get(name, 1))
    if products == "int8":
        assert sum(one.products == "int8" for one in used) == (0 if units else len(used))
    assert _error(plain, exact) < 2e-6
    assert 10 * _error(plain, exact) < _error(found, exact) < 3e-2
    assert _error(double, exact) < 1e-12


def test_gradients_are_those_of_float32() -> None:
    """A backward pass multiplies by the weights as they are, whatever is asked for around it."""
    x = torch.randn(5, 12, requires_grad=True)
    rest = {k: v.float() for k, v in case_of("transition", 5).inputs.items() if k != "x"}
    (expected,) = torch.autograd.grad(named_operators.transition(x, **rest).sum(), x)
    out = named_operators.transition(x, **rest).sum()
    with reduced_products("int8"):
        (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("with_bias", [True, False])
def test_in_a_fold_products_are_onednn_s_whatever_the_setting_is_later(
    with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exact as float32 on every processor, in rows and in columns."""
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: True)
    x, weight, bias = _made(300, 129, 65)
    with exact_products(torch.device("cpu")):
        layer = PreparedLinear(weight, bias if with_bias else None)
        expected = torch.addmm(bias if with_bias else torch.zeros(65), x, weight.T)
    with torch.autograd.profiler.profile() as profile:
        found = layer(x, "out", Scratch())
    assert "mkldnn::_linear_pointwise" in {event.name for event in profile.function_events}
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    assert _error(found, exact) < 3e-7
    assert _error(expected, exact) < 3e-7
    columns = torch.empty(65, 300).T
    assert _error(layer.fill(columns, x, Scratch()), exact) < 3e-7
    assert _error(layer.fill(torch.empty(300, 130)[:, :65], x, Scratch()), exact) < 3e-7


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("side", "by_onednn"), [(159, False), (160, True)])
def test_large_matrices_of_a_batch_are_multiplied_one_by_one(
    side: int, by_onednn: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: True)
    torch.manual_seed(side)
    a, b = torch.randn(3, side, 170), torch.randn(3, 170, 180)
    exact = a.double() @ b.double()
    a, b = (x.mT.contiguous().mT if transposed else x for x in (a, b))
    out = torch.full((4, side, 180), torch.nan)[:3]
    with exact_products(torch.device("cpu")), torch.autograd.profiler.profile() as profile:
        batched_product(a, b, out)
    names = [event.name for event in profile.function_events]
    assert names.count("mkldnn::_linear_pointwise") == (3 if by_onednn else 0)
    assert _error(out, exact) < 3e-7


def test_sums_of_products_are_onednn_s_in_a_design(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: True)
    torch.manual_seed(0)
    total, a, b = torch.randn(40, 30), torch.randn(50, 40), torch.randn(50, 30)
    exact = total.double() + a.double().T @ b.double()
    with exact_products(torch.device("cpu")), torch.autograd.profiler.profile() as profile:
        add_products(total, a.T, b, Scratch())
    assert "mkldnn::_linear_pointwise" in {event.name for event in profile.function_events}
    assert _error(total, exact) < 3e-7


@pytest.mark.parametrize("products", [None, "bf16"])
def test_a_weight_is_packed_once_for_many_positions_to_the_same_bits(
    products: Products | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (cpu_products.multiplies_bfloat16() if products else cpu_products.multiplied_by_onednn()):
        pytest.skip("this processor has no such products")
    monkeypatch.setattr(linear, "onednn_multiplies", lambda: products is None)
    packed: list[int] = []

    def pack_weight(weight: Tensor, rows: int) -> Tensor:
        packed.append(rows)
        return cpu_products.pack_weight(weight, rows)

    monkeypatch.setattr(linear, "pack_weight", pack_weight)
    x, weight, bias = _made(300, 256, 256)
    with torch.inference_mode(), nullcontext() if products is None else reduced_products(products):
        least = 4096 if products is None else 16384
        plain = PreparedLinear(weight, bias, positions=least - 1)
        assert not packed
        one = PreparedLinear(weight, bias, positions=least)
        assert packed == [1024]
        for rows in (x, x[:7]):
            expected = plain(rows, "out", Scratch())
            assert one(rows, "out", Scratch()).equal(expected)
            assert one.fill(torch.empty(len(rows), 256), rows, Scratch()).equal(expected)
            assert (one.by_channel(rows, "out", Scratch()).t() - expected).abs().max() < (
                1e-4 if products is None else 0.5
            )
    assert packed == [1024]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_multiplied_as_the_data_if_the_processor_can(
    dtype: torch.dtype, units: bool
) -> None:
    """Their sum over blocks is float32."""
    a, b, _ = _made(64, 48, 40)
    total = torch.ones(64, 40)
    add_product(total, a, b.t(), Scratch(), torch.empty(1, dtype=dtype))
    rounded = (a.bfloat16() @ b.bfloat16().t()).float()
    assert torch.equal(total, 1 + (rounded if units and dtype == torch.bfloat16 else a @ b.t()))
