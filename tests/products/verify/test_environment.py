"""``fastfold environment`` says what a bug report needs, and nothing private."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastfold
from fastfold.products.verify import environment
from fastfold.products.verify.environment import describe_environment
from fastfold.utils.units import GIB
from tests.helpers.command_line import CommandLine
from tests.helpers.command_line import cli as cli


def test_versions_devices_and_packages_are_there() -> None:
    found = describe_environment()
    assert found["fastfold"] == fastfold.__version__
    assert found["python"] == platform.python_version()
    assert found["torch"].startswith(torch.__version__)
    assert found["numpy"] == metadata.version("numpy")
    assert "cores" in found["processor"]
    assert ("GPU" in found) != torch.cuda.is_available()


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC version: gcc 12.2.0\n",
            "550.54.15",
        ),
        ("NVRM version: Open Kernel Module  570.86  Release\n", "570.86"),
        ("unknown\n", "unknown"),
        ("", "none found"),
        (None, "none found"),
    ],
)
def test_a_machine_of_gpus_names_them_and_their_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, driver: str
) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(environment, "Path", {"/proc/driver/nvidia/version": file}.__getitem__)
    sizes = [80 * GIB, 24 * GIB]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda number: SimpleNamespace(name=f"N{number}", major=9, minor=number, total_memory=sizes[number]),
    )
    found = describe_environment()
    assert found["NVIDIA driver"] == driver
    assert {key: value for key, value in found.items() if key.startswith("GPU")} == {
        "GPU 0": "N0, capability 9.0, 80.0 GiB",
        "GPU 1": "N1, capability 9.1, 24.0 GiB",
    }


def test_a_package_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["no-such-package>=1", "nor-this>=1; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    found = describe_environment()
    assert found["no-such-package"] == "missing"
    assert "nor-this" not in found


def test_settings_are_shown_without_paths_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTFOLD_KERNELS", "torch")
    monkeypatch.setenv("FASTFOLD_WEIGHTS", "/home/someone/weights")
    monkeypatch.setenv("CUDA_API_KEY", "secret")
    monkeypatch.setenv("UNRELATED", "x")
    found = describe_environment()
    assert found["FASTFOLD_KERNELS"] == "torch"
    assert found["FASTFOLD_WEIGHTS"] == found["CUDA_API_KEY"] == "set"
    assert "UNRELATED" not in found


def test_the_command_prints_a_line_for_each(cli: CommandLine) -> None:
    done = cli.run("environment")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()][:3] == ["fastfold", "python", "system"]
