"""``fastfold environment``: describe the machine and the installation, for bug reports."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from fastfold._version import __version__
from fastfold.utils.machine import available_cores, host_available_bytes, processor_name
from fastfold.utils.units import GIB

_SETTINGS = re.compile(r"(FASTFOLD|TRITON|PYTORCH|CUDA|OMP|MKL|NCCL)_\w+")
_NOT_SHOWN = re.compile(r"[/\\]|TOKEN|KEY|PASSWORD")
"""Variables whose values are not shown, because they are paths or secrets."""


def describe_environment() -> dict[str, str]:
    """Describe this machine and installation.

    Returns:
        Text by name: versions, processor, memory, GPUs, packages (``missing`` if not installed), and the environment
        variables that change a run. Paths and the names of machine and user are left out.
    """
    import torch

    facts = {
        "fastfold": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": f"{processor_name()}, {available_cores()} cores",
        "free memory": f"{host_available_bytes() / GIB:.1f} GiB",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "NVIDIA driver": _driver(),
    }
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        facts[f"GPU {number}"] = (
            f"{device.name}, capability {device.major}.{device.minor}, {device.total_memory / GIB:.1f} GiB"
        )
    if not torch.cuda.is_available():
        facts["GPU"] = "none that PyTorch can use"
    facts |= {package: _version(package) for package in _packages() if package != "torch"}
    for name in sorted(filter(_SETTINGS.fullmatch, os.environ)):
        value = os.environ[name]
        facts[name] = "set" if _NOT_SHOWN.search(name + value) else value
    return facts


def _packages() -> list[str]:
    try:
        declared = metadata.requires("fastfold") or []
    except metadata.PackageNotFoundError:  # run from a checkout, not installed
        return []
    names = [re.match(r"[\w.-]+", line) for line in declared if "extra ==" not in line]
    return [name[0] for name in names if name is not None]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _driver() -> str:
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "none found"
    version = re.search(r"\d+\.\d+(\.\d+)?", line)
    return version[0] if version else line
