"""Products of float32 on tensor cores: as exact as fused multiply-adds, by default where there are any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.kernels.recording import as_chip
from benchmarks.kernels.variants import CHIPS
from fastfold import kernels
from fastfold.errors import ConfigError
from fastfold.kernels.common.backend import VARIABLE, interpreted
from fastfold.kernels.common.triton_math import precision, products_suffix
from fastfold.kernels.common.tuning import (
    FALLBACK,
    FLOAT32_VARIABLE,
    TF32X3,
    float32_products,
    launch_config,
)
from tests.helpers import named_operators
from tests.helpers.kernel_checks import (
    DEVICE,
    TOLERANCES,
    check_against_definition,
    output_and_gradients,
    relative_error,
)
from tests.helpers.tensor_cores import (
    Array,
    core_product,
    fused_product,
    products_made_by,
    rounded,
    split_product,
)
from tests.kernels.test_operators import NAMES, Case, case_of

WITHOUT_PRODUCTS = ("layer_norm", "residual_update")
META = torch.device("meta")


def _tf32x3(a: Array, b: Array, start: Array) -> Array:
    return split_product(a, b, start, TF32X3)


@pytest.mark.skipif(not interpreted(), reason="needs a process with Triton's interpreter")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_PRODUCTS])
def test_operators_are_as_exact_on_tensor_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, within the tolerance of float32, with the roundings of a tensor core."""
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv(FLOAT32_VARIABLE, TF32X3)
    case = case_of(name, 17)
    with products_made_by(PRODUCTS) as asked:
        check_against_definition(case.operator, case.definition, case.inputs, torch.float32, case.constants)
    assert set(asked) == {"TF32x3"}


PRODUCTS = {"TF32x3": _tf32x3, "IEEE": fused_product}


def _randn(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    return (mean + scale * torch.randn(shape, dtype=torch.float64)).float()


def _linear(outputs: int, prefix: str, c: int) -> dict[str, torch.Tensor]:
    return {f"{prefix}_weight": _randn(outputs, c, scale=c**-0.5), f"{prefix}_bias": _randn(outputs)}


def _norm(prefix: str, c: int = 128) -> dict[str, torch.Tensor]:
    return {f"{prefix}_weight": _randn(c, scale=0.2, mean=1.0), f"{prefix}_bias": _randn(c, scale=0.2)}


def _wide(name: str, c: int = 128) -> Case:
    """An operator on a few positions, with weights as large as a network's.

    It has the 128 channels of a pair, or ``c`` where it is given, attention two heads of 64 and no bias, whose gradient
    keeps to fused multiply-adds there.
    """
    torch.manual_seed(0)
    operator = getattr(named_operators, name, None) or getattr(kernels, name)
    definition = getattr(kernels.reference, name)
    if name == "transition":
        inputs = {"x": _randn(20, 128)} | _norm("norm")
        inputs |= {"w1": _randn(512, 128, scale=128**-0.5), "b1": _randn(512)}
        inputs |= {"w2": _randn(128, 512, scale=512**-0.5), "b2": _randn(128)}
    elif name == "triangle_multiplication":
        inputs = {"z": _randn(7, 7, c), "mask": torch.ones(7, 7)} | _norm("norm_in", c) | _norm("norm_out", c)
        inputs |= _linear(2 * c, "proj", c) | _linear(2 * c, "gate", c)
        inputs |= _linear(c, "out", c) | _linear(c, "out_gate", c)
        return Case(operator, definition, inputs | {"outgoing": True}, frozenset({"mask"}))
    elif name == "attention":
        inputs = {key: _randn(2, 37, 2, 64) for key in "qkv"}
    elif name == "outer_product_mean":
        inputs = {"left": _randn(40, 3, 8), "right": _randn(40, 3, 8)}
        inputs |= {"left_mask": torch.ones(40, 3), "right_mask": torch.ones(40, 3)}
        inputs |= {"weight": _randn(128, 64, scale=1 / 8), "bias": _randn(128)}
        return Case(operator, definition, inputs, frozenset({"left_mask", "right_mask"}))
    else:
        inputs = {"z": _randn(9, 9, c)} | _norm("norm", c) | {"weight": _randn(4, c, scale=c**-0.5)}
    return Case(operator, definition, inputs, frozenset())


@pytest.mark.skipif(not interpreted(), reason="needs a process with Triton's interpreter")
@pytest.mark.parametrize(
    ("name", "c", "made_by"),
    [
        pytest.param("transition", 128, {"TF32x3"}, marks=pytest.mark.slow),
        pytest.param("triangle_multiplication", 128, {"TF32x3"}, marks=pytest.mark.slow),
        pytest.param("triangle_multiplication", 256, {"TF32x3", "IEEE"}, marks=pytest.mark.slow),
        ("attention", 128, {"TF32x3"}),
        ("outer_product_mean", 128, {"TF32x3"}),
        ("pair_bias", 128, {"TF32x3"}),
        ("pair_bias", 256, {"TF32x3", "IEEE"}),
    ],
)
def test_many_channels_are_as_exact_as_with_fused_multiply_adds(
    name: str, c: int, made_by: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and every gradient: 2.5 times the error at most, or 2^-22, by the configurations that ship.

    At 256 channels some kernels keep to fused multiply-adds.
    """
    monkeypatch.setenv(VARIABLE, "triton")
    case = _wide(name, c)
    doubles = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in case.inputs.items()}
    exact = output_and_gradients(case.definition, doubles, case.constants)
    errors: dict[str, dict[str, float]] = {}
    for products, wanted in ((TF32X3, made_by), ("ieee", {"IEEE"})):
        monkeypatch.setenv(FLOAT32_VARIABLE, products)
        with products_made_by(PRODUCTS) as asked:
            found = output_and_gradients(case.operator, case.inputs, case.constants)
        assert set(asked) == wanted
        errors[products] = {key: relative_error(found[key], value) for key, value in exact.items()}
    for key, error in errors[TF32X3].items():
        assert error < max(2.5 * errors["ieee"][key], 2**-22), key


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("products", [TF32X3, "ieee"])
@pytest.mark.parametrize("name", NAMES)
def test_operators_are_as_exact_on_a_gpu(name: str, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLOAT32_VARIABLE, products)
    case = case_of(name, 129)
    check_against_definition(case.operator, case.definition, case.inputs, torch.float32, case.constants)


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("length", [32, 5120])
@pytest.mark.parametrize("positive", [False, True])
def test_sums_of_any_length_are_as_exact_as_with_fused_multiply_adds(length: int, positive: bool) -> None:
    """In blocks of 32, whose sums are added up in float32; two parts of bfloat16 are not exact enough."""
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=shape).astype(np.float32) for shape in ((16, length), (length, 16)))
    if positive:
        a, b = abs(a), abs(b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    found = {kind: np.zeros((16, 16), np.float32) for kind in (TF32X3, "bf16x3", "tf32", "fma")}
    for k in range(0, length, 32):
        block = a[:, k : k + 32], b[k : k + 32]
        for kind in (TF32X3, "bf16x3"):
            found[kind] = split_product(*block, found[kind], kind)
        found["tf32"] = core_product(*(rounded(x, "tf32") for x in block), found["tf32"])
    found["fma"] = fused_product(a, b, found["fma"])
    errors = {kind: _error(x, exact) for kind, x in found.items()}
    assert errors[TF32X3] < max(1.2 * errors["fma"], 2.5e-7)
    assert errors[TF32X3] < TOLERANCES[torch.float32] / 4
    assert errors["tf32"] > 8 * TOLERANCES[torch.float32]
    if not positive:
        assert errors["bf16x3"] > 3 * TOLERANCES[torch.float32]


def test_parts_are_rounded_as_the_formats_are() -> None:
    x = np.array([1 + 2**-11, 1 + 2**-10, -1 - 2**-11 - 2**-20, 3.0, 0.0, 1e30], np.float32)
    tf32 = rounded(x, "tf32")
    np.testing.assert_array_equal(tf32[:5], np.array([1 + 2**-10, 1 + 2**-10, -1 - 2**-10, 3.0, 0.0]))
    assert abs(tf32[5] / x[5] - 1) <= 2**-11
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded(x, "bf16"), expected)
    small = x - tf32
    assert (np.abs(tf32.astype(np.float64) + small - x) == 0).all()


def test_tensor_cores_are_used_where_they_have_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLOAT32_VARIABLE, raising=False)
    assert float32_products(torch.device("cpu")) == "ieee"
    for chip in CHIPS:
        with as_chip(chip):
            assert float32_products(META) == ("ieee" if chip == FALLBACK else TF32X3)
    monkeypatch.setenv(FLOAT32_VARIABLE, "ieee")
    with as_chip("sm_90"):
        assert float32_products(META) == "ieee"
    with as_chip("sm_90", TF32X3):
        assert float32_products(META) == TF32X3
    monkeypatch.setenv(FLOAT32_VARIABLE, "bf16x3")
    with pytest.raises(ConfigError, match="expected auto, tf32x3 or ieee, found 'bf16x3'"):
        float32_products(META)
    monkeypatch.setenv(FLOAT32_VARIABLE, TF32X3)
    assert float32_products(META) == TF32X3
    with as_chip(FALLBACK), pytest.raises(ConfigError, match="this GPU does not support TF32"):
        float32_products(torch.device("cuda"))


def test_only_kernels_with_an_entry_of_their_own_take_it() -> None:
    """Others, whose configurations were chosen for products of float32, keep these."""
    x = torch.empty(1, dtype=torch.float32, device="meta")
    with as_chip("sm_80"):
        own = launch_config("attention_grad_kv", f"fp32_32_{TF32X3}", META)
        assert own != launch_config("attention_grad_kv", "fp32_32", META)
        assert precision(x, own) == TF32X3
        same = launch_config("attention_grad_kv", f"fp32_128_{TF32X3}", META)
        assert same == launch_config("attention_grad_kv", "fp32_128", META)
        assert precision(x, same) == precision(x) == precision(x.bfloat16(), own) == "ieee"
        torch.set_float32_matmul_precision("high")
        try:
            assert precision(x, own) == "tf32"
            assert products_suffix(x) == ""
        finally:
            torch.set_float32_matmul_precision("highest")
        assert (products_suffix(x), products_suffix(x.bfloat16())) == (f"_{TF32X3}", "")
