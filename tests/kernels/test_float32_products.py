"""Products of float32 on tensor cores: as exact as fused multiply-adds, by default where there are any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.kernels.common.backend import VARIABLE, interpreted
from fastfold.kernels.common.triton_math import precision, products_suffix
from fastfold.kernels.common.tuning import (
    CHIPS,
    FALLBACK,
    FLOAT32_VARIABLE,
    TF32X3,
    as_chip,
    float32_products,
    launch_config,
)
from tests.helpers.kernel_checks import DEVICE, TOLERANCES, check_against_definition
from tests.helpers.tensor_cores import core_product, on_tensor_cores, rounded, split_product
from tests.kernels.test_operators import NAMES, case_of

WITHOUT_PRODUCTS = ("layer_norm", "residual_update", "softmax")
META = torch.device("meta")


@pytest.mark.skipif(not interpreted(), reason="needs a process with Triton's interpreter")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_PRODUCTS])
def test_operators_are_as_exact_on_tensor_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, within the tolerance of float32, with the roundings of a tensor core."""
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv(FLOAT32_VARIABLE, TF32X3)
    case = case_of(name, 17)
    with on_tensor_cores(TF32X3) as made:
        check_against_definition(case.operator, case.definition, case.inputs, torch.float32, case.constants)
    assert made


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
    for k in range(length):
        added = a[:, k : k + 1].astype(np.float64) * b[k : k + 1] + found["fma"]
        found["fma"] = added.astype(np.float32)
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
    with pytest.raises(ConfigError, match=r"='bf16x3': .* auto, tf32x3 or ieee"):
        float32_products(META)
    monkeypatch.setenv(FLOAT32_VARIABLE, TF32X3)
    assert float32_products(META) == TF32X3
    with as_chip(FALLBACK), pytest.raises(ConfigError, match="this GPU has no products of TF32"):
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
