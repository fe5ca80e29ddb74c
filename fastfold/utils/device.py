"""Devices by their names on the command line, tensors copied to and from them, and tensors that were moved away."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.utils.machine import process_memory


def choose_device(name: str, *, remedy: str = "`device=cpu`") -> torch.device:
    """Return the device of a name: ``auto`` (CUDA if available, else the CPU), ``cpu``, ``cuda[:<number>]``, ``mps``.

    Args:
        name: The name.
        remedy: Setting of the CPU in messages.

    Raises:
        ConfigError: The device does not exist, or a GPU was asked for and cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name) is None:
        raise ConfigError(
            f"unknown device {name!r}; use auto, cpu, cuda, cuda:1 for the second GPU, or mps for an Apple GPU"
        )
    if name == "cpu":
        return torch.device(name)
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(f"no Apple GPU can be used here: use {remedy}, or PyTorch's build for macOS 14")
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device can be used here: check the driver with nvidia-smi and that PyTorch is a CUDA build, "
            f"or use {remedy}"
        )
    device = torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"no device {name!r}; GPUs here: {torch.cuda.device_count()}, the first is cuda:0")
    return device


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a GPU is PyTorch's current device; it does nothing for other devices.

    Events, streams, libraries and kernels of other packages use the current device, whatever the device of tensors.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def own_settings(device: torch.device) -> Iterator[None]:
    """Run PyTorch on a device without the caller's autocast and default device.

    Raises:
        ConfigError: PyTorch's default dtype is not float32; it holds for all threads, so it is not changed here.
    """
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"expected PyTorch's default dtype float32, found {torch.get_default_dtype()}; call "
            "torch.set_default_dtype(torch.float32) first, and give other dtypes by precision="
        )
    with contextlib.ExitStack() as settings:
        for kind in {"cpu", device.type}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                settings.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            settings.enter_context(torch.device("cpu"))
        settings.enter_context(current_device(device))
        yield


def has_float64(device: torch.device) -> bool:
    """Return True if a device computes in float64; Apple's GPUs do not."""
    return device.type != "mps"


def to_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no float64."""
    return x.double() if has_float64(x.device) else x.cpu().double()


def reads_are_free(device: torch.device) -> bool:
    """Return True if the host can read a tensor's values without waiting for the device."""
    return device.type == "cpu"


def upload(x: Any, device: torch.device) -> Tensor:
    """Copy an array or tensor of the host to a device; CUDA copies do not block."""
    tensor = torch.as_tensor(x)
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class HostCopy:
    """Copy of a tensor to the host, made while device and host continue; none of a tensor on the CPU."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = x.detach()
        if x.device.type == "cuda":
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))

    def read(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the peak of memory since the start, in bytes.

    On CUDA it is PyTorch's memory on the device, else the resident set of the process; None if the system does not
    report it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: int(torch.cuda.max_memory_allocated(device))
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set
    yield lambda: process_memory("VmHWM")


class AbsentTensor(Tensor):
    """Tensor with a shape but without numbers; reading or changing them raises an error.

    It replaces a tensor that was moved away, so that no caller takes its absence for zeros.

    ``reason`` is the error's message: the place of the numbers, and what to do instead.
    """

    reason: str

    @staticmethod
    def __new__(cls, like: Tensor, reason: str) -> AbsentTensor:
        made: Any = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.reason = reason
        return made

    def __init__(self, like: Tensor, reason: str) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor({list(self.shape)}: {self.reason})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        raise ConfigError(next(x.reason for x in flat if isinstance(x, AbsentTensor)))
