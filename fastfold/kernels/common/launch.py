"""Launch of a Triton kernel, on the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that launches a kernel on the device of its first tensor.

    Triton launches on the current device, whatever the device of the tensors. All launches go through this function.

    Args:
        kernel: A function under ``triton.jit``.
        grid: Number of programs along each axis.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(next(_tensors(arguments))):
            return kernel[grid](*arguments, **options)

    return run


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)
