"""Hopper's kernels are assembled by the newest assembler in Triton's wheel that the driver can follow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastfold.kernels.common import launch

triton = pytest.importorskip("triton")
HOPPER = torch.device("cuda:1")


@pytest.mark.parametrize(
    ("newer", "older", "driver", "better"),
    [
        ("13.1", "12.8", (13, 0), True),
        ("12.10", "12.9", (12, 4), True),
        ("13.1", "12.8", (12, 9), False),
        ("12.8", "12.8", (13, 0), False),
        ("13.1", "12.8", (0, 0), False),
    ],
)
def test_the_driver_must_load_what_it_makes(
    newer: str, older: str, driver: tuple[int, int], better: bool
) -> None:
    assert launch.is_better(newer, older, driver) is better


@pytest.mark.parametrize(
    ("capability", "variable", "path"),
    [((9, 0), None, "/new"), ((8, 0), None, "/old"), ((10, 0), None, "/old"), ((9, 0), "/mine", "/old")],
)
def test_hopper_alone_gets_it_unless_the_user_has_chosen(
    capability: tuple[int, int], variable: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = SimpleNamespace(path="/old", version="12.8"), SimpleNamespace(path="/new", version="13.1")
    nvidia = SimpleNamespace(ptxas=old, ptxas_blackwell=new)
    monkeypatch.setattr(triton.knobs, "nvidia", nvidia)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launch, "driver_version", lambda: (13, 0))
    if variable is None:
        monkeypatch.delenv(launch.ASSEMBLER_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(launch.ASSEMBLER_VARIABLE, variable)
    launch.choose_assembler.__wrapped__(HOPPER)
    assert getattr(nvidia.ptxas, "path", nvidia.ptxas) == path


def test_a_machine_without_a_driver_is_one_of_version_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(launch.ctypes, "CDLL", missing)
    assert launch.driver_version() == (0, 0)


def test_triton_has_what_is_asked_for() -> None:
    """The names of Triton's settings, with the Triton that is installed."""
    assert triton.knobs.nvidia.ptxas.version.count(".") == 1
    assert triton.knobs.nvidia.ptxas_blackwell.version.count(".") == 1
