"""Every kernel is launched on the device of its tensors, whatever the current device is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fastfold.kernels
from benchmarks.kernels.recording import launches_replaced
from fastfold.errors import ConfigError
from fastfold.kernels.common import backend
from fastfold.kernels.common.launch import LaunchRefused, launch
from tests.kernels.test_operators import NAMES, case_of

PACKAGE = Path(fastfold.kernels.__file__).parent


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Current device of a machine with two GPUs, as a stack."""
    devices = [0]

    def exchange(index: int) -> int:
        devices.append(index)
        return devices[-2]

    def restore(index: int) -> int:
        return devices.pop()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", restore)
    return devices


class Kernel:
    def __init__(self, current: list[int]) -> None:
        self.current, self.seen = current, []  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.seen.append((grid, self.current[-1]))


class OneKernel:
    def __init__(self, name: str, run: Any) -> None:
        self.__name__, self.run = name, run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.run


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices are imitated")
def test_a_launch_is_on_the_device_of_its_tensors(current: list[int]) -> None:
    kernel = Kernel(current)
    with FakeTensorMode():
        for index in (1, 0):
            x = torch.empty(3, device=f"cuda:{index}")
            launch(kernel, (7,))(x, 5)
            launch(kernel, (8,))((None, (x,)), 5)
    assert kernel.seen == [((7,), 1), ((8,), 1), ((7,), 0), ((8,), 0)]
    assert current == [0]


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="devices are imitated")
def test_a_kernel_that_a_gpu_has_too_little_for_leaves_it_to_pytorch(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This GPU alone, and what asks for Triton by name learns why not."""

    class OutOfResources(Exception):
        pass

    def run(*arguments: Any, **options: Any) -> None:
        raise OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376")

    monkeypatch.setattr(backend, "_refused", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("FASTFOLD_KERNELS", raising=False)
    kernel = OneKernel("attention_kernel", run)
    with FakeTensorMode():
        refused, other = (torch.empty(3, device=f"cuda:{index}") for index in (1, 0))
        assert backend.choose_backend(refused, "auto") == "triton"
        with pytest.raises(LaunchRefused, match=r"attention_kernel needs more .*Required: 131072.*cuda:1"):
            launch(kernel, (7,))(refused)
        assert backend.choose_backend(refused, "auto") == "torch"
        assert backend.choose_backend(other, "auto") == "triton"
        with pytest.raises(ConfigError, match="attention_kernel needs more"):
            backend.choose_backend(refused, "triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices are imitated")
def test_every_launch_of_every_operator_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[Tensor] = []
    launched: list[tuple[str, bool]] = []

    @contextmanager
    def guard(tensor: Tensor) -> Iterator[None]:
        guards.append(tensor)
        yield
        guards.pop()

    def launcher(kernel: Any, grid: Any) -> Any:
        launched.append((kernel.__name__, bool(guards)))
        return lambda *arguments, **options: None

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setenv("FASTFOLD_KERNELS", "triton")
    with launches_replaced(launcher):
        for name in NAMES:
            case = case_of(name, 5)
            inputs = {
                k: v.float().requires_grad_(k not in case.constants) if isinstance(v, Tensor) else v
                for k, v in case.inputs.items()
            }
            out = case.operator(**inputs)
            out.sum().backward()
    names = {name for name, _ in launched}
    assert len(names) >= 15, names
    assert [name for name, guarded in launched if not guarded] == []


def test_no_kernel_is_launched_past_the_guard() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            if is_launch and "kernel" in ast.unparse(node.func.value):  # type: ignore[attr-defined]
                found.append(path.relative_to(PACKAGE).as_posix())
    assert found == ["common/launch.py"]
