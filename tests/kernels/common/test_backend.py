"""Who decides which implementation runs, and that the Triton one reaches all of a huge tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fastfold import kernels
from fastfold.errors import ConfigError
from fastfold.kernels import reference
from fastfold.kernels.common import backend as backends
from fastfold.kernels.common.backend import VARIABLE, choose_backend, interpreted
from tests.helpers.kernel_checks import DEVICE, far_apart, relative_error

needs_interpreter = pytest.mark.skipif(not interpreted(), reason="a GPU cannot read a file with holes")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_auto_never_takes_the_interpreter() -> None:
    """Tests set TRITON_INTERPRET for the whole process; models must not become slow by it."""
    if interpreted():
        assert choose_backend(torch.zeros(1)) == choose_backend(torch.zeros(1), "auto") == "torch"
    else:
        assert choose_backend(torch.zeros(1, device=DEVICE)) == "triton"


def test_the_argument_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, device=DEVICE)
    monkeypatch.setenv(VARIABLE, "triton")
    assert choose_backend(x) == "triton"
    assert choose_backend(x, "torch") == "torch"
    monkeypatch.setenv(VARIABLE, "torch")
    assert choose_backend(x) == "torch"
    assert choose_backend(x, "triton") == "triton"
    monkeypatch.setenv(VARIABLE, "")
    assert choose_backend(x, "auto") == choose_backend(x)


def test_a_missing_variable_costs_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    # Whoever asks ``os.environ`` here fails. Other threads of this process may ask it.
    monkeypatch.setattr(backends, "os", None)
    assert choose_backend(x) == "torch"


def test_compiled_operators_do_not_watch_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[GraphModule] = []

    def compiler(graph: GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    normalize = torch.compile(lambda x: kernels.layer_norm(x, None, None), backend=compiler)
    for name in ("FIRST_VARIABLE", "SECOND_VARIABLE"):
        normalize(torch.zeros(2, 3))
        monkeypatch.setenv(name, "1")
    assert len(graphs) == 1


def test_rows_that_kernels_do_not_hold_are_pytorchs() -> None:
    x = torch.zeros(1, device=DEVICE)
    assert (choose_backend(x, "triton"), choose_backend(x, "triton", fits=False)) == ("triton", "torch")
    with pytest.raises(ConfigError, match="float64"):
        choose_backend(x.double(), "triton", fits=False)


def test_an_unknown_backend_is_named_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'cuda'; use auto, triton, torch, cueq \(FASTFOLD_KERNELS\)"):
        choose_backend(torch.zeros(1), "cuda")
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match="'fast'"):
        kernels.layer_norm(torch.zeros(2, 3), None, None)


def test_what_triton_cannot_do_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    double = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    assert choose_backend(double) == "torch"
    with pytest.raises(ConfigError, match=r"float64.*use the backend auto or torch"):
        choose_backend(double, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="the tensor is on cpu"):
        choose_backend(torch.zeros(1), "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", False)
    with pytest.raises(ConfigError, match="triton is not installed"):
        choose_backend(torch.zeros(1), "triton")


def test_the_variable_decides_what_an_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "fastfold.kernels.ops.layer_norm.triton_fwd.layer_norm_forward",
        lambda x, *_: calls.append(x) or torch.empty_like(x),
    )
    x = torch.zeros(2, 3, device=DEVICE)
    kernels.layer_norm(x, None, None, backend="torch")
    assert not calls
    monkeypatch.setenv(VARIABLE, "triton")
    kernels.layer_norm(x, None, None)
    assert len(calls) == 1


@pytest.fixture
def hole(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "memory"
    yield path
    path.unlink(missing_ok=True)


@needs_interpreter
@pytest.mark.parametrize("rows", [2, 33], ids=["stride beyond 2^31", "row times stride beyond 2^31"])
def test_layer_norm_reaches_rows_beyond_two_to_the_31(rows: int, hole: Path) -> None:
    x = far_apart(torch.randn(rows, 16), hole)
    x.requires_grad_()
    out = kernels.layer_norm(x, None, None, backend="triton")
    leaf = x.detach().double().requires_grad_()
    exact = reference.layer_norm(leaf, None, None)
    assert relative_error(out, exact) < 5e-3
    grad = torch.randn(rows, 16)
    (found,) = torch.autograd.grad(out, x, grad.bfloat16())
    (wanted,) = torch.autograd.grad(exact, leaf, grad.bfloat16().double())
    assert relative_error(found, wanted) < 5e-3


@needs_interpreter
@pytest.mark.parametrize("rows", [2, 33])
def test_pair_bias_reaches_rows_beyond_two_to_the_31(rows: int, hole: Path) -> None:
    torch.manual_seed(rows)
    z = far_apart(torch.randn(rows, 16), hole).unsqueeze(1)
    z.requires_grad_()
    parameters = [torch.randn(*shape).bfloat16() for shape in [(16,), (16,), (2, 16)]]
    out = kernels.pair_bias(z, *parameters, backend="triton")
    leaf = z.detach().double().requires_grad_()
    exact = reference.pair_bias(leaf, *(p.double() for p in parameters))
    assert relative_error(out, exact) < 5e-3
    (found,) = torch.autograd.grad(out.sum(), z)
    (wanted,) = torch.autograd.grad(exact.sum(), leaf)
    assert relative_error(found, wanted) < 5e-3


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (12, 0)])
def test_old_chips_take_pytorch_for_16_bits(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.empty(4, dtype=dtype, device="cuda:0")
            is_old = capability[0] < 8 and dtype != torch.float32
            assert choose_backend(x) == ("torch" if is_old else "triton")
            if is_old:
                with pytest.raises(
                    ConfigError, match=r"16 bits need compute capability 8\.0, and this GPU has 7\.5"
                ):
                    choose_backend(x, "triton")


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="devices are imitated")
def test_rocm_takes_pytorch_unless_triton_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration is compiled for AMD's GPUs."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.delenv(VARIABLE, raising=False)
    with FakeTensorMode():
        x = torch.empty(4, device="cuda:0")
        assert choose_backend(x) == "torch"
        assert choose_backend(x, "triton") == "triton"
