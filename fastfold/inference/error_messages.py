"""What a person is told when something fails: one message that says what, and what to do about it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastfold.errors import FastFoldError
from fastfold.utils.packages import missing_module

if TYPE_CHECKING:
    from fastfold.data.targets import Target


def reason(error: Exception, target: Target) -> str:
    """Why a target failed, in one message that names it."""
    if isinstance(error, FastFoldError):
        named = getattr(error, "record", None) == target.name or str(error).startswith(f"{target.name} ")
        return str(error) if named else f"{target.name}: {error}"
    if is_out_of_memory(error):
        return (
            f"{target.name}: the memory was not enough for {target.num_residues} residues; use --precision bf16, "
            "close other programs, or take a device with more memory"
        )
    return f"{target.name}: {internal_error(error)}"


def internal_error(error: Exception) -> str:
    """Return the message for an error that should not exist, or for a package that is not installed."""
    if isinstance(error, ModuleNotFoundError) and (message := missing_module(error)) is not None:
        return message
    lines = str(error).strip().splitlines()
    what = type(error).__name__ + (f": {lines[0]}" if lines else "")
    return (
        f"internal error, {what}. This is a bug in FastFold; FASTFOLD_DEBUG=1 shows where, please report it"
    )


def debugging() -> bool:
    """Whether the user asked for tracebacks, with ``FASTFOLD_DEBUG=1`` in the environment."""
    return os.environ.get("FASTFOLD_DEBUG", "0") not in ("", "0")


_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",  # Triton
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "hipErrorOutOfMemory",
)
"""Texts of untyped errors, raised by libraries other than PyTorch's allocator."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the memory of a device or of the machine was not enough."""
    # PyTorch has a type of its own for an accelerator, which is not imported for this, and none for the CPU.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in _OUT_OF_MEMORY)
    )
