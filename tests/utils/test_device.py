"""A device is one that is there, or the message says which are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.utils.device import (
    HostCopy,
    choose_device,
    current_device,
    has_float64,
    own_settings,
    reads_are_free,
    to_float64,
    upload,
)


@pytest.mark.parametrize("there", [True, False])
def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device("auto").type == ("cuda" if there else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("tpu", True, "unknown device 'tpu'; use auto, cpu, cuda"),
        ("cuda:x", True, "unknown device 'cuda:x'"),
        ("cuda:2", True, "no device 'cuda:2'; GPUs here: 2, the first is cuda:0"),
        ("cuda", False, "no CUDA device can be used here"),
        ("mps", True, "no Apple GPU can be used here: use device='cpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, there: bool, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        choose_device(name)


def test_an_apple_gpu_is_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by its name alone, because no test runs on it."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps") == torch.device("mps")
    assert choose_device("auto").type in ("cuda", "cpu")
    assert [has_float64(torch.device(name)) for name in ("mps", "cpu", "cuda")] == [False, True, True]
    assert to_float64(torch.ones(2)).dtype == torch.float64


def test_arrays_go_to_a_device_and_tensors_come_back_as_they_are() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    on_device = upload(array, torch.device("cpu"))
    assert on_device.dtype == torch.float32
    assert HostCopy(on_device).read().tolist() == array.tolist()
    assert upload(array, torch.device("meta")).shape == (2, 3)
    assert reads_are_free(torch.device("cpu"))
    assert not reads_are_free(torch.device("meta"))


def test_a_gpu_becomes_the_current_device_and_a_cpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    for name in ("cpu", "cuda:1"):
        with current_device(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:1")]


def test_own_settings_end_autocast_and_another_default_device_and_restore_them() -> None:
    device = torch.device("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        with own_settings(device):
            x = torch.ones(2, 2)
            assert (x.device, (x @ x).dtype) == (device, torch.float32)
        x = torch.ones(2, 2)
        assert x.is_meta
        with torch.device("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_another_default_dtype_is_refused() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with (
            pytest.raises(ConfigError, match=r"default dtype float32, found torch\.float64"),
            own_settings(torch.device("cpu")),
        ):
            pass
    finally:
        torch.set_default_dtype(torch.float32)
