"""``fastfold environment`` says what a bug report needs, and nothing private."""

from __future__ import annotations

import platform
from importlib import metadata

import pytest
import torch

import fastfold
from fastfold.products.verify.environment import describe_environment
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
