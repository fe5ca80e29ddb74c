"""The constraints go with what PyTorch's ordinary wheel for Linux requires, so that ``make demo`` installs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.project import constraints, project_table

TORCH_2_13 = """\
filelock
typing-extensions>=4.10.0
setuptools>=77.0.3
sympy>=1.13.3
networkx>=2.5.1
jinja2
fsspec>=0.8.5
cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3; sys_platform == "linux"
cuda-bindings<14,>=13.0.3; python_full_version < "3.15" and sys_platform == "linux"
nvidia-cudnn-cu13==9.20.0.48; sys_platform == "linux"
nvidia-cusparselt-cu13==0.8.1; sys_platform == "linux"
nvidia-nccl-cu13==2.29.7; sys_platform == "linux"
nvidia-nvshmem-cu13==3.4.5; sys_platform == "linux"
triton==3.7.1; python_full_version < "3.15" and sys_platform == "linux"
"""  # noqa: E501
"""Requires-Dist of ``torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl`` of the package index."""


def _write_wheel(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    """Write a wheel without code, of any platform."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def _lowest(requirement: Requirement) -> str:
    return next((part.version for part in requirement.specifier if part.operator in ("==", ">=")), "1.0")


def _resolve(folder: Path, pins: list[str], requirements: list[str]) -> subprocess.CompletedProcess[str]:
    """Let pip resolve requirements against stub wheels alone: one of every pin, and what torch requires."""
    wheels = folder / "wheels"
    wheels.mkdir()
    for line in [*requirements, *TORCH_2_13.splitlines(), *pins]:
        stub = Requirement(line)
        if stub.marker is None or stub.marker.evaluate():
            torch = TORCH_2_13.splitlines() if stub.name == "torch" else ()
            _write_wheel(wheels, stub.name, _lowest(stub), torch)
    (folder / "constraints.txt").write_text("\n".join(pins), encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(requirements), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-index", "--find-links", "wheels", "-c", "constraints.txt", "-r", "requirements.txt"]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _requirements() -> list[str]:
    project = project_table()
    return [*project["dependencies"], *project["optional-dependencies"]["test"]]


def test_the_project_resolves_with_the_requirements_of_torchs_wheel(tmp_path: Path) -> None:
    resolved = _resolve(tmp_path, constraints(), _requirements())
    assert resolved.returncode == 0, resolved.stderr
    assert "torch-2.13.0" in resolved.stdout
    if sys.platform == "linux":
        assert "triton-3.7.1" in resolved.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="torch requires Triton on Linux")
def test_a_pin_of_triton_that_torch_contradicts_does_not_resolve(tmp_path: Path) -> None:
    resolved = _resolve(tmp_path, [*constraints(), "triton==3.9.0"], _requirements())
    assert resolved.returncode != 0
    assert "ResolutionImpossible" in resolved.stderr


def test_constraints_pin_nothing_that_torch_pins() -> None:
    """Those follow the wheel of torch that is installed."""
    exact = {
        found.name
        for found in map(Requirement, TORCH_2_13.splitlines())
        if any(part.operator == "==" for part in found.specifier)
    }
    assert not exact & {Requirement(line).name for line in constraints()}
