"""Which implementation an operator runs: Triton's on GPUs, PyTorch's elsewhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.layout import MAX_CHANNELS, MAX_ROW_LENGTH

Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "torch")
VARIABLE = "FASTFOLD_KERNELS"
"""Environment variable that decides where no backend is given."""

_OLDEST_16_BITS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU and slowly (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def choose_backend(x: Tensor, backend: str | None = None) -> Literal["triton", "torch"]:
    """The implementation for a tensor.

    Args:
        x: What the operator works on.
        backend: ``auto`` (Triton for float32, bfloat16 and float16 on CUDA and ROCm, PyTorch for everything else,
            for 16 bits on GPUs below compute capability 8, and where a kernel asked for more than the GPU has),
            ``triton`` or ``torch``; by default what the environment variable ``FASTFOLD_KERNELS`` says, or ``auto``.
            On ROCm nothing has been tested: the kernels run with the configurations of unknown chips.

    Raises:
        ConfigError: There is no such backend, or Triton was asked for and cannot run here.
    """
    name = backend or os.environ.get(VARIABLE) or "auto"
    if name not in BACKENDS:
        raise ConfigError(f"there is no kernel backend {name!r}; use {', '.join(BACKENDS)} ({VARIABLE})")
    if name == "torch":
        return "torch"
    reason = _no_triton(x)
    # The interpreter is for tests, and tensors of shapes alone are for counting: nobody gets them unasked.
    if reason is None and (name == "triton" or not (interpreted() or x.is_meta)):
        return "triton"
    if name == "triton":
        raise ConfigError(
            f"Triton kernels cannot run here: {reason}; use the backend auto or torch ({VARIABLE})"
        )
    return "torch"


def rows_backend(x: Tensor, backend: str | None) -> Literal["triton", "torch"]:
    """The implementation of an operator whose programs hold rows of ``x``; longer ones are left to PyTorch."""
    chosen = choose_backend(x, backend)
    return chosen if x.shape[-1] <= MAX_ROW_LENGTH else "torch"


def products_backend(x: Tensor, channels: int, backend: str | None) -> Literal["triton", "torch"]:
    """The implementation of an operator on ``x`` whose products hold ``channels``; more are left to PyTorch."""
    chosen = choose_backend(x, backend)
    return chosen if channels <= MAX_CHANNELS else "torch"


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, Triton's path runs on tensors of the device ``meta``, and its kernels are not launched.

    What a GPU would have to allocate can be counted so on any machine. For the whole process.

    Raises:
        ConfigError: Triton is not installed.
    """
    if not _TRITON_INSTALLED:
        raise ConfigError(
            "what Triton's path allocates cannot be counted: the package triton is not installed"
        )
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "triton"
    try:
        with launches_replaced(lambda kernel, grid: lambda *arguments, **options: None):
            yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextmanager
def launches_replaced(launcher: Callable[[Any, Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, ``kernel[grid]`` is ``launcher(kernel, grid)``. For the whole process."""
    from triton.runtime.jit import KernelInterface

    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = launcher
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before


_refused: dict[torch.device, str] = {}


def leave_to_pytorch(device: torch.device, reason: str) -> None:
    """Choose PyTorch from now on for tensors of a device, whose GPU has too little for a kernel.

    Args:
        device: The device, with its index.
        reason: Why, for who asks for Triton by name.
    """
    _refused[device] = reason


_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def _no_triton(x: Tensor) -> str | None:
    """Why Triton cannot work on ``x``; None if it can."""
    if x.dtype not in _DTYPES:
        return f"they know no {x.dtype}".replace("torch.", "")
    if not (x.is_cuda or x.is_meta or interpreted()):
        return f"the tensor is on {x.device.type}, and they need a GPU"
    if x.is_cuda and x.dtype.itemsize == 2 and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(x.device)
        if major < _OLDEST_16_BITS:
            # Their registers and shared memory do not hold the blocks.
            return f"16 bits need compute capability {_OLDEST_16_BITS}.0, and this GPU has {major}.{minor}"
    if x.device in _refused:
        return _refused[x.device]
    return None if _TRITON_INSTALLED else "the package triton is not installed"
