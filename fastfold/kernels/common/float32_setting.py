"""PyTorch's setting for products of float32, for all of its interfaces."""

from __future__ import annotations

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


@contextmanager
def exact_on_gpu() -> Iterator[None]:
    """Make cuDNN's float32 convolutions exact, and keep sums of 16-bit products in float32."""
    # PyTorch rounds both by default. Products of float32 stay as `float32_setting` says.
    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = (
        convolutions.fp32_precision,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )
    convolutions.fp32_precision = "ieee"
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        (
            convolutions.fp32_precision,
            products.allow_bf16_reduced_precision_reduction,
            products.allow_fp16_reduced_precision_reduction,
        ) = before
