"""PyTorch's setting for products of float32, for all of its interfaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def float32_setting() -> str:
    """Return ``highest`` if float32 products must be exact, else ``high`` or ``medium``."""
    # PyTorch's own getter raises an error if a backend's ``fp32_precision`` is set, which PyTorch recommends.
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


_lock = threading.Lock()
_before: list[tuple[str, bool, bool]] = []  # the settings before the first of all calls, once for each


@contextmanager
def exact_on_gpu() -> Iterator[None]:
    """Make cuDNN's float32 convolutions exact, and keep sums of 16-bit products in float32.

    The settings are the process's, so they last until the last of several threads leaves.
    """
    # PyTorch rounds both by default. Products of float32 stay as `float32_setting` says.
    with _lock:
        _before.append(_before[0] if _before else _settings())
        _set("ieee", False, False)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                _set(*before)


def _settings() -> tuple[str, bool, bool]:
    products = torch.backends.cuda.matmul
    return (
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )


def _set(convolutions: str, bfloat16_sums: bool, float16_sums: bool) -> None:
    products = torch.backends.cuda.matmul
    torch.backends.cudnn.conv.fp32_precision = convolutions  # type: ignore[attr-defined]
    products.allow_bf16_reduced_precision_reduction = bfloat16_sums
    products.allow_fp16_reduced_precision_reduction = float16_sums
