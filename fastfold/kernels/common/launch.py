"""Launch of a Triton kernel on the device of its tensors."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.backend import leave_to_pytorch

ASSEMBLER_VARIABLE = "TRITON_PTXAS_PATH"
"""Triton's environment variable for its assembler; a value set by the user is kept."""


class LaunchRefused(ConfigError):
    """Error of a GPU with too little shared memory or too few registers for a kernel; PyTorch is chosen afterwards."""

    # The operator may have written a part of its result in place, so only its caller can start again.


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that launches a kernel on the device of its first tensor.

    Triton launches on the current device, whatever the device of the tensors. All launches go through this function.
    The grid is the number of programs along each axis.

    Raises:
        LaunchRefused: Raised by the returned function: the GPU has too little memory or registers for the kernel.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        first = next(_tensors(arguments))
        choose_assembler(first.device)
        try:
            with torch.cuda.device_of(first):
                return kernel[grid](*arguments, **options)
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # of Triton, which may not be installed
                raise
            name = getattr(kernel, "__name__", "a kernel")
            reason = f"{name} needs more than this GPU has ({error})"
            leave_to_pytorch(first.device, reason)
            raise LaunchRefused(
                f"{reason}. Run it again: PyTorch computes on {first.device} from now on"
            ) from error

    return run


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


@functools.cache
def choose_assembler(device: torch.device) -> None:
    """Give Triton its newest assembler if the device is a Hopper GPU, for the whole process."""
    # Triton before 3.9 takes the older one in its wheel for compute capability 9.0. That one is reported to reuse
    # registers of an asynchronous product too early, so the newer one is chosen if the driver can load its machine
    # code.
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get(ASSEMBLER_VARIABLE):
        return
    if torch.cuda.get_device_capability(device)[0] != 9:
        return
    from triton import knobs

    newer = getattr(knobs.nvidia, "ptxas_blackwell", None)
    if newer is not None and is_better(newer.version, knobs.nvidia.ptxas.version, driver_version()):
        knobs.nvidia.ptxas = newer.path


def is_better(newer: str, older: str, driver: tuple[int, int]) -> bool:
    """Return True if an assembler is newer than another, and the driver can load its machine code."""
    # A driver loads machine code of toolkits with its own major version or an older one. All are versions of CUDA,
    # such as ``13.1``.
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
