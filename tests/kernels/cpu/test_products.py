"""Which library multiplies float32 matrices on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastfold import kernels
from fastfold.kernels.cpu import products as cpu_products
from fastfold.kernels.cpu.products import exact_products, small_products
from fastfold.kernels.ops.attention import eager

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    cpu_products._onednn_is_better.cache_clear()
    yield
    cpu_products._onednn_is_better.cache_clear()


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A processor of AMD without AMX; its description."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n")
    monkeypatch.setattr(cpu_products, "_CPUINFO", path)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(cpu_products, "_is_exact", lambda: True)
    return path


def _setting_within(device: torch.device = CPU) -> str:
    with exact_products(device):
        return torch.get_float32_matmul_precision()


def test_onednn_multiplies_on_amd(amd: Path) -> None:
    assert _setting_within() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_setting_comes_back_after_an_error(amd: Path) -> None:
    with pytest.raises(KeyError), exact_products(CPU):
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_small_products_are_mkl_s_within(amd: Path) -> None:
    with exact_products(CPU):
        with small_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError), small_products():
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_small_products_leave_a_user_s_setting_alone() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with small_products():
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("queries", [5, 300])
def test_attention_s_products_are_small_ones(
    amd: Path, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in every block, and what surrounds them is not."""
    found = []
    attend = eager.scaled_dot_product_attention

    def watched(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        found.append(torch.get_float32_matmul_precision())
        return attend(*arguments, **options)

    monkeypatch.setattr(eager, "scaled_dot_product_attention", watched)
    q, k, v = torch.randn(3, 1, 2, queries, 2, 8).unbind(0)
    with exact_products(CPU):
        kernels.attention(q, k, v, backend="torch")
        assert torch.get_float32_matmul_precision() == "medium"
    assert found
    assert set(found) == {"highest"}


@pytest.mark.parametrize("text", ["vendor_id\t: GenuineIntel\n", "processor\t: 0\n", None])
def test_others_stay_with_mkl(amd: Path, text: str | None) -> None:
    amd.unlink() if text is None else amd.write_text(text)
    assert _setting_within() == "highest"


def test_a_processor_that_would_round_stays_with_mkl(amd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        assert _setting_within() == "highest"
    cpu_products._onednn_is_better.cache_clear()
    monkeypatch.setattr(cpu_products, "_is_exact", lambda: False)
    assert _setting_within() == "highest"


def test_other_devices_and_settings_of_the_user_are_left_alone(amd: Path) -> None:
    assert _setting_within(torch.device("meta")) == "highest"
    torch.set_float32_matmul_precision("high")
    try:
        assert _setting_within() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("error", "exact"), [(0.0, True), (1e-3, False)])
def test_rounded_products_are_found_out(error: float, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.Tensor.__matmul__

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = product(a, b)
        return found * (1 + error) if torch.get_float32_matmul_precision() == "medium" else found

    # Without the machine's own rounding, which may be there.
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: setting.append(name))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting[-1])
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    setting: list[str] = ["highest"]
    assert cpu_products._is_exact() is exact
    assert setting[-1] == "highest"


def test_products_of_this_machine_are_exact_within() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator) for shape in ((300, 256), (256, 65)))
    with exact_products(CPU):
        found = a @ b
    exact = a.double() @ b.double()
    assert (found - exact).abs().max() < 1e-6 * exact.abs().max()
