"""Launch of a Triton kernel on the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.assembler import choose_assembler
from fastfold.kernels.common.backend import leave_to_pytorch


class LaunchRefused(ConfigError):
    """Error of a GPU with too little shared memory or too few registers for a kernel; PyTorch is chosen afterwards.

    The operator may have written a part of its result in place, so only its caller can start again.
    """


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that launches a kernel on the device of its first tensor.

    Triton launches on the current device, whatever the device of the tensors. All launches go through this function.

    Args:
        kernel: Function under ``triton.jit``.
        grid: Number of programs along each axis.

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
