"""Error messages for users."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from fastfold.errors import FastFoldError, spelled
from fastfold.utils.foreign_text import cut
from fastfold.utils.packages import missing_module

if TYPE_CHECKING:
    from fastfold.data.targets import Target


def reason(error: Exception, target: Target) -> str:
    """Return one message that names the target and the reason of its failure."""
    if isinstance(error, FastFoldError):
        begins = str(error).startswith((f"{target.name} ", f"{target.name}: "))
        is_named = begins or getattr(error, "record", None) == target.name
        return str(error) if is_named else f"{target.name}: {error}"
    if is_out_of_memory(error):
        return spelled(
            f"{target.name}: out of memory for {target.num_residues} residues; use `precision=bf16`, close other "
            "programs, or use a device with more memory"
        )
    return f"{target.name}: {internal_error(error)}"


def internal_error(error: Exception) -> str:
    """Return the message for an internal error, a path that the system refuses, or a package that is missing."""
    if isinstance(error, ModuleNotFoundError) and (message := missing_module(error)) is not None:
        return message
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_SYSTEM:
        name = cut(os.fsdecode(error.filename), _LONGEST_NAME)
        return f"{name}: {error.strerror}; check the path, its permissions and its disk"
    lines = str(error).strip().splitlines()
    what = type(error).__name__ + (f": {lines[0]}" if lines else "")
    return (
        f"internal error, {what}. This is a bug in FastFold; FASTFOLD_DEBUG=1 shows where, please report it"
    )


_OF_PATHS = ("EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP", "EMFILE", "ENFILE")
_OF_DISKS = ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN")
_OF_SYSTEM = {getattr(errno, name) for name in (*_OF_PATHS, *_OF_DISKS) if hasattr(errno, name)}
"""Numbers of errors that a path or its disk causes, not the program."""
_LONGEST_NAME = 200


def debugging() -> bool:
    """Return True if the environment variable ``FASTFOLD_DEBUG=1`` asks for tracebacks."""
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
"""Texts of untyped errors of libraries other than PyTorch."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error means that a device or the machine ran out of memory."""
    # PyTorch has an own type for accelerators, which is not imported for this, and none for the CPU.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in _OUT_OF_MEMORY)
    )
