"""Which implementation an operator runs: Triton's on GPUs, PyTorch's elsewhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.layout import LONGEST_ROW, MOST_CHANNELS

Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "torch")
VARIABLE = "FASTFOLD_KERNELS"
"""Environment variable that decides where no backend is given."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU and slowly (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def choose_backend(x: Tensor, backend: str | None = None) -> Literal["triton", "torch"]:
    """The implementation for a tensor.

    Args:
        x: What the operator works on.
        backend: ``auto`` (Triton for float32, bfloat16 and float16 on CUDA and ROCm, PyTorch for everything else),
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


def rows_run_on_triton(x: Tensor, backend: str | None) -> bool:
    """Whether Triton runs an operator whose programs hold rows of ``x``; longer ones are left to PyTorch."""
    return choose_backend(x, backend) == "triton" and x.shape[-1] <= LONGEST_ROW


def products_run_on_triton(x: Tensor, channels: int, backend: str | None) -> bool:
    """Whether Triton runs an operator on ``x`` whose products hold ``channels``; more are left to PyTorch."""
    return choose_backend(x, backend) == "triton" and channels <= MOST_CHANNELS


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
    from triton.runtime.jit import KernelInterface

    def nothing(*_: Any, **__: Any) -> None:
        return None

    before, launch = os.environ.get(VARIABLE), KernelInterface.__getitem__
    os.environ[VARIABLE] = "triton"
    KernelInterface.__getitem__ = lambda *_: nothing
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def _no_triton(x: Tensor) -> str | None:
    """Why Triton cannot work on ``x``; None if it can."""
    if x.dtype not in _DTYPES:
        return f"they know no {x.dtype}".replace("torch.", "")
    if not (x.is_cuda or x.is_meta or interpreted()):
        return f"the tensor is on {x.device.type}, and they need a GPU"
    return None if _TRITON_INSTALLED else "the package triton is not installed"
