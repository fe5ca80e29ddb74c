"""Replacements of kernel launches and of the class of chips, for measurements and tests without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from fastfold.errors import ConfigError
from fastfold.kernels.common import tuning
from fastfold.kernels.common.backend import VARIABLE
from fastfold.kernels.common.tuning import FLOAT32_VARIABLE


@contextmanager
def launches_replaced(launcher: Callable[[Any, Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace ``kernel[grid]`` by ``launcher(kernel, grid)``, for the whole process."""
    from triton.runtime.jit import KernelInterface

    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = launcher
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before


@contextmanager
def launches_observed(name: str, observe: Callable[[Callable[[], Any]], object]) -> Iterator[None]:
    """Give the launches of a kernel to ``observe``, which makes each by a call, for the whole process.

    ``name`` is the kernel's name in the table of configurations.
    """
    from triton.runtime.jit import KernelInterface

    original = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        run = original(kernel, grid)
        if kernel.__name__.removesuffix("_kernel") != name:
            return run
        return lambda *arguments, **options: observe(functools.partial(run, *arguments, **options))

    with launches_replaced(launcher):
        yield


@contextmanager
def without_launches() -> Iterator[None]:
    """Run Triton's path on ``meta`` tensors without launching its kernels, for the whole process.

    This counts the allocations of a GPU on any machine.

    Raises:
        ConfigError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "cannot count the allocations of Triton's path: the package triton is not installed"
        )
    nothing = launches_replaced(lambda kernel, grid: lambda *arguments, **options: None)
    with mock.patch.dict(os.environ, {VARIABLE: "triton"}), nothing:
        yield


class _Entries(dict[str, Any]):
    """Configurations of a kernel by class of chips, which note the class of the last one that was used."""

    used: str

    def __getitem__(self, chip: str) -> Any:
        self.used = chip
        return super().__getitem__(chip)


@contextmanager
def as_chip(chip: str, float32: str | None = None) -> Iterator[dict[str, _Entries]]:
    """Use the configurations of a class of chips on every device, for the whole process.

    ``float32`` is a result of :func:`~fastfold.kernels.common.tuning.float32_products`, by default that of the class.
    Yields the entries of each kernel; ``used`` is the class of the one that was last found: this one, or ``any``.
    """
    table = {kernel: _Entries(entries) for kernel, entries in tuning.configurations().items()}

    def chip_class(device: torch.device) -> str:
        return chip

    def configurations() -> dict[str, dict[str, dict[str, tuning.LaunchConfig]]]:
        return table

    products = mock.patch.dict(os.environ, {FLOAT32_VARIABLE: float32}) if float32 else nullcontext()
    functions = {"chip_class": chip_class, "configurations": configurations}
    with mock.patch.multiple(tuning, **functions), products:
        yield table
