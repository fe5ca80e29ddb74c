"""Choice of Triton's assembler for Hopper.

Triton before 3.9 takes the older one in its wheel for compute capability 9.0. That one is reported to reuse registers
of an asynchronous product too early, so the newer one is chosen if the driver can load its machine code.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

VARIABLE = "TRITON_PTXAS_PATH"
"""Triton's environment variable for the assembler; a value set by the user is kept."""


@functools.cache
def choose_assembler(device: torch.device) -> None:
    """Give Triton its newest assembler if the device is a Hopper GPU, for the whole process.

    Args:
        device: Device of the next launch.
    """
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get(VARIABLE):
        return
    if torch.cuda.get_device_capability(device)[0] != 9:
        return
    from triton import knobs

    newer = getattr(knobs.nvidia, "ptxas_blackwell", None)
    if newer is not None and is_better(newer.version, knobs.nvidia.ptxas.version, driver_version()):
        knobs.nvidia.ptxas = newer.path


def is_better(newer: str, older: str, driver: tuple[int, int]) -> bool:
    """Return True if an assembler is newer than another, and the driver can load its machine code.

    A driver loads machine code of toolkits with its own major version or an older one.

    Args:
        newer: CUDA version of the first assembler, such as ``13.1``.
        older: CUDA version of the second.
        driver: CUDA version of the driver.
    """
    return _numbers(newer) > _numbers(older) and _numbers(newer)[0] <= driver[0]


def driver_version() -> tuple[int, int]:
    """Return the CUDA version of NVIDIA's driver; zeros without a driver."""
    number = ctypes.c_int(0)
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
        library.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
