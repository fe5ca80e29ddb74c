"""Which library multiplies float32 matrices on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastfold
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.kernels.cpu import linear
from fastfold.kernels.cpu import products as cpu_products
from fastfold.kernels.cpu.products import exact_products, onednn_multiplies
from fastfold.memory.devices.simulated import SimulatedDevice

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    caches = cpu_products._onednn_is_better, cpu_products.multiplies_bfloat16
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A processor of AMD without units for bfloat16; its description."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n")
    monkeypatch.setattr(cpu_products, "_CPUINFO", path)
    for name in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
    monkeypatch.setattr(cpu_products, "_is_exact", lambda: True)
    return path


def _multiplies_within(device: torch.device = CPU) -> bool:
    before = torch.get_float32_matmul_precision()
    with exact_products(device):
        assert torch.get_float32_matmul_precision() == before
        return onednn_multiplies()


def test_onednn_multiplies_on_amd(amd: Path) -> None:
    assert _multiplies_within()
    assert not onednn_multiplies()


def test_the_choice_ends_with_an_error(amd: Path) -> None:
    with pytest.raises(KeyError), exact_products(CPU):
        raise KeyError
    assert not onednn_multiplies()


@pytest.mark.parametrize("text", ["vendor_id\t: GenuineIntel\n", "processor\t: 0\n", None])
def test_others_stay_with_mkl(amd: Path, text: str | None) -> None:
    amd.unlink() if text is None else amd.write_text(text)
    assert not _multiplies_within()


@pytest.mark.parametrize(("name", "is_exact"), [("amx_tile", False), ("avx512_bf16", True)])
def test_a_processor_that_may_round_stays_with_mkl(
    amd: Path, name: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: True)
    assert _multiplies_within() == is_exact


def test_without_amx_float32_is_exact_even_if_the_process_permits_rounding() -> None:
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("with AMX, oneDNN rounds float32 if it may")
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert cpu_products._is_exact()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_a_processor_that_rounds_stays_with_mkl(amd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "_is_exact", lambda: False)
    assert not _multiplies_within()


def test_other_devices_and_settings_of_the_user_are_left_alone(amd: Path) -> None:
    assert not _multiplies_within(torch.device("meta"))
    torch.set_float32_matmul_precision("high")
    try:
        assert not _multiplies_within()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("error", "exact"), [(0.0, True), (1e-3, False)])
def test_rounded_products_are_found_out(error: float, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t() * (1 + error)

    monkeypatch.setattr(cpu_products, "onednn_linear", rounded)
    assert cpu_products._is_exact() is exact


def test_modes_of_the_caller_do_not_see_the_trial() -> None:
    """Training counts operations, and simulates devices whose memory the trial would fill."""

    class Recording(TorchDispatchMode):
        seen: ClassVar[list[Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    expected = cpu_products._is_exact()
    with Recording() as mode, SimulatedDevice(1000).running():
        assert cpu_products._is_exact() == expected
    assert mode.seen == []
    with FakeTensorMode():
        assert cpu_products._is_exact() == expected


def _compilable(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor) -> list[Tensor]:
    all_narrow = x.dtype == torch.bfloat16 and (bias is None or bias.dtype == x.dtype)
    return [
        *(
            cpu_products.onednn_linear(x, weight, bias, activation)
            for activation in ("none", "relu", "sigmoid")
        ),
        *(cpu_products.onednn_linear_with(x, weight, bias, other, op) for op in ("add", "mul") if all_narrow),
    ]


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [
        (torch.float32, None),
        (torch.float32, torch.float32),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_compiled_products_are_right_and_leave_onednn_s_operators_out(
    dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    """Inductor refuses these operators where the weight is not a constant of the graph."""
    if dtype == torch.bfloat16 and not cpu_products.multiplies_bfloat16():
        pytest.skip("oneDNN multiplies bfloat16 on processors with units for it")
    generator = torch.Generator().manual_seed(3)
    x, weight, other = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((20, 16), (8, 16), (20, 8))
    )
    bias = None if bias_dtype is None else torch.randn(8, generator=generator).to(bias_dtype)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(_compilable, fullgraph=True, backend=backend)(x, weight, bias, other)
    assert called
    assert not any("mkldnn" in name for name in called)
    sums = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    exact = [sums, sums.relu(), sums.sigmoid(), sums + other.double(), sums * other.double()]
    error = 1e-6 if dtype == torch.float32 else 2**-7  # rounded twice
    for products in (compiled, _compilable(x, weight, bias, other)):
        for product, expected in zip(products, exact, strict=False):
            assert product.dtype == dtype
            assert (product - expected).abs().max() < error * expected.abs().max()


def test_products_of_this_machine_are_exact_within() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((300, 256), (65, 256)))
    exact = x.double() @ weight.double().t()
    with exact_products(CPU):
        products = x @ weight.t(), cpu_products.onednn_linear(x, weight)
    for found in products:
        assert (found - exact).abs().max() < 1e-6 * exact.abs().max()


def test_products_of_another_thread_stay_the_same_during_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, on every processor: the choice of a fold is its thread's alone."""
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: True)
    torch.manual_seed(2)
    x, weight = torch.randn(300, 256), torch.randn(65, 256)
    expected = x @ weight.t()
    started, folded = threading.Event(), threading.Event()
    seen: list[tuple[bool, str, bool]] = []

    def multiply() -> None:
        while True:
            is_last = folded.is_set()
            setting = torch.get_float32_matmul_precision()
            seen.append((torch.equal(x @ weight.t(), expected), setting, onednn_multiplies()))
            started.set()
            if is_last:
                return

    network = fastfold.load_model("mini", device="cpu")
    multiply_linear, calls = cpu_products.onednn_linear, []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(len(seen))
        return multiply_linear(*arguments)

    monkeypatch.setattr(linear, "onednn_linear", counted)
    other = threading.Thread(target=multiply)
    other.start()
    try:
        started.wait()
        fastfold.predict("MKTAYIAKQRLLAGIT", network, num_recycles=0)
    finally:
        folded.set()
        other.join()
    assert calls
    assert calls[0] < calls[-1]  # the other thread multiplied between products of the fold
    assert set(seen) == {(True, "highest", False)}


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_gradients_are_multiplied_by_onednn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As exactly as by MKL, in every block and on every thread."""
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: True)
    weights: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        weights.append(weight.data_ptr())
        return cpu_products.onednn_linear(x, weight, *rest)

    monkeypatch.setattr(linear, "onednn_linear", counted)
    torch.manual_seed(3)
    node = model_config("model_1").model.embeddings_and_evoformer.evoformer
    block = EvoformerBlock(node, 32, 16, zero_init=False)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        block.to(dtype)
        generator = torch.Generator().manual_seed(4)
        inputs = [
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((5, 60, 32), (60, 60, 16))
        ]
        msa, pair = (x.to(dtype).requires_grad_() for x in inputs)
        ones = torch.ones(60, 60, dtype=dtype)
        new_msa, new_pair = block(msa, pair, ones[:5], ones)
        loss = new_msa.square().mean() + new_pair.square().mean()
        weights.clear()
        return torch.autograd.grad(loss, [msa, pair, *block.parameters()])

    by_mkl = gradients(torch.float32)
    assert not weights
    with exact_products(CPU):
        by_onednn = gradients(torch.float32)
    for layer in (block.pair_transition.hidden, block.pair_transition.output):
        assert layer.weight.data_ptr() in weights
    assert len(weights) > 20
    for ours, theirs, exact in zip(by_onednn, by_mkl, gradients(torch.float64), strict=True):
        error = (theirs - exact).abs().max()
        assert (ours - exact).abs().max() <= 4 * error + 1e-7 * exact.abs().max()
