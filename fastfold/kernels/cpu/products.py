"""Choice of the library for float32 products on a CPU: MKL, or oneDNN if it is as exact and faster."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import _disable_current_modes

from fastfold.kernels.common.float32_setting import exact_on_gpu, float32_setting

_CPUINFO = Path("/proc/cpuinfo")
_ONEDNN_MULTIPLIES = ContextVar("onednn_multiplies", default=False)
onednn_multiplies = _ONEDNN_MULTIPLIES.get
"""Return True if :func:`exact_products` gives products of layers to oneDNN at the moment."""
_ROUNDING = 1e-6
"""Maximum error of an exact product, relative to its largest value; bfloat16 or TF32 would have about 1e-3."""


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Let the faster of the exact libraries make float32 products of layers on the CPU.

    PyTorch's default, MKL, is slow on AMD's processors, and oneDNN is fast there. Layers ask :func:`onednn_multiplies`
    and call :func:`onednn_linear`. PyTorch's own setting, which also gives products to oneDNN, is left alone: it is the
    process's, and permits rounding to bfloat16. On other processors nothing changes.

    For GPUs see :func:`~fastfold.kernels.common.float32_setting.exact_on_gpu`.
    """
    if device.type == "cuda":
        with exact_on_gpu():
            yield
        return
    token = _ONEDNN_MULTIPLIES.set(device.type == "cpu" and multiplied_by_onednn())
    try:
        yield
    finally:
        _ONEDNN_MULTIPLIES.reset(token)


BFLOAT16_UNITS = (("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512_BF16"))
"""Processor units that multiply bfloat16, the best first: PyTorch's function that detects them, and their name."""

INT8_UNIT = ("_is_vnni_supported", "VNNI")
"""Processor unit that multiplies 8 bits: PyTorch's function that detects it, and its name."""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return True if the processor has units for bfloat16 products, and oneDNN is available to use them."""
    return torch.backends.mkldnn.is_available() and any(
        getattr(torch.cpu, supported)() for supported, _ in BFLOAT16_UNITS
    )


@functools.cache
def prefers_batched_products() -> bool:
    """Return True if batched products of bfloat16 are faster than PyTorch's flash kernel of attention."""
    # That kernel has tiles for AMX only (benchmarks/results/choices.md).
    return multiplies_bfloat16() and not torch.cpu._is_amx_tile_supported()


def has_units(products: Literal["bf16", "int8"]) -> bool:
    """Return True if the processor has units for products in a precision; those for bfloat16 also serve ``int8``."""
    return multiplies_bfloat16() or (products == "int8" and getattr(torch.cpu, INT8_UNIT[0])())


def onednn_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["none", "relu", "sigmoid"] = "none",
) -> torch.Tensor:
    """Compute ``activation(x Wᵀ + b)`` by oneDNN, whatever the process's setting; other threads may change it.

    ``x [n, K]`` and the weight ``[N, K]``, or the result of :func:`pack_weight`, are in float32, or in bfloat16 if
    :func:`multiplies_bfloat16`. The bias ``[N]`` is in float32 or in the dtype of ``x``. The ReLU turns NaN into zero.
    In compiled code PyTorch chooses the library.
    """
    if torch.compiler.is_compiling():
        compiled = _compilable_linear(x, weight, bias)
        if activation == "relu":
            return torch.relu(compiled)
        return torch.sigmoid(compiled) if activation == "sigmoid" else compiled
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
    return product


def onednn_linear_with(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor,
    operation: Literal["add", "mul"],
) -> torch.Tensor:
    """Compute the sum or product of ``x Wᵀ + b`` and ``other``, rounded once; all are in bfloat16.

    In compiled code PyTorch chooses the library, and the product is rounded too.
    """
    if torch.compiler.is_compiling():
        compiled = _compilable_linear(x, weight, bias)
        return compiled + other if operation == "add" else compiled * other
    # The operator's overload has no type.
    combined: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, operation)
    return combined


def _compilable_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``x Wᵀ + b`` in the dtype of ``x`` by operators that PyTorch's compiler accepts for any weight."""
    # Inductor generates code for oneDNN's operators only if the weight is a constant of the graph.
    exact = x.dtype if bias is None else bias.dtype
    return linear(x.to(exact), weight.to(exact), bias).to(x.dtype)


def pack_weight(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Lay a weight ``[N, K]`` out as oneDNN multiplies it, once for many calls of :func:`onednn_linear`.

    The product is the same bit for bit. Most calls have ``rows`` rows.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def multiplied_by_onednn() -> bool:
    """Return True if :func:`exact_products` gives the products of layers on a CPU to oneDNN."""
    untouched = float32_setting() == "highest" and not torch.cuda.is_initialized()
    return untouched and _onednn_is_better()


def onednn_bytes() -> int:
    """Return the bytes of code that oneDNN compiles for shapes of products, and of operands in another layout."""
    return 40 << 20 if multiplied_by_onednn() else 0


@functools.cache
def _onednn_is_better() -> bool:
    """Return True if oneDNN is exact and faster on this processor."""
    # The processor decides, not a measurement, so that a fold gives the same bits every time. With AMX, oneDNN rounds
    # as soon as another thread permits it. Units of AVX512 multiply data in bfloat16 only.
    return (
        torch.backends.mkldnn.is_available()
        and _vendor() == "AuthenticAMD"
        and not torch.cpu._is_amx_tile_supported()
        and _is_exact()
    )


def _vendor() -> str | None:
    """Return the processor's maker as Linux names it; None if unknown."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    vendors = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(vendors, None)


def _is_exact() -> bool:
    """Return True if oneDNN's float32 products are exact for shapes that may have kernels of their own."""
    generator = torch.Generator().manual_seed(0)
    # Modes of the caller would count these products, or charge them to a simulated device.
    with _disable_current_modes():
        for rows, inner, columns in ((512, 256, 128), (37, 100, 129), (1, 64, 64)):
            x, weight = (torch.randn(n, inner, generator=generator) for n in (rows, columns))
            exact = x.double() @ weight.double().t()
            if (onednn_linear(x, weight) - exact).abs().max() > _ROUNDING * exact.abs().max():
                return False
    return True
