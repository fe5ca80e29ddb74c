"""Which library multiplies float32 matrices on a CPU: MKL, or oneDNN where that is as exact and faster."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fastfold.kernels.common.float32_setting import exact_on_gpu, float32_setting

_CPUINFO = Path("/proc/cpuinfo")
_onednn_multiplies = False
_ROUNDING = 1e-6
"""Error of an exact product as a share of its largest value; bfloat16 or TF32 would make 1e-3."""


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Inside, float32 products on the CPU are made by the faster library of those that are exact.

    PyTorch gives them to MKL, which knows AMD's processors badly: oneDNN does twice as many there. PyTorch lets oneDNN
    have them by the setting that permits it to round to bfloat16, which it does where the processor has units for
    that and AMD's have none; this is tried out once. Elsewhere, and where the setting was changed before, nothing
    changes. The setting is the process's.

    Args:
        device: Where the products are made; on a GPU see
            :func:`~fastfold.kernels.common.float32_setting.exact_on_gpu`.
    """
    if device.type == "cuda":
        with exact_on_gpu():
            yield
        return
    if device.type != "cpu" or not multiplied_by_onednn():
        yield
        return
    with _by_onednn():
        yield


@contextmanager
def _by_onednn() -> Iterator[None]:
    global _onednn_multiplies
    torch.set_float32_matmul_precision("medium")
    _onednn_multiplies = True
    try:
        yield
    finally:
        _onednn_multiplies = False
        torch.set_float32_matmul_precision("highest")


@contextmanager
def small_products() -> Iterator[None]:
    """Inside :func:`exact_products`, give products to MKL again.

    For operators that make many small ones: oneDNN takes longer to find out how to multiply the tiles of attention
    than MKL takes for the products.
    """
    global _onednn_multiplies
    if not _onednn_multiplies:
        yield
        return
    torch.set_float32_matmul_precision("highest")
    _onednn_multiplies = False
    try:
        yield
    finally:
        _onednn_multiplies = True
        torch.set_float32_matmul_precision("medium")


BFLOAT16_UNITS = (("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512_BF16"))
"""Units of processors that multiply bfloat16: how to ask PyTorch for them, and their names; the best first."""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has units for products of bfloat16, and oneDNN is there to use them."""
    return torch.backends.mkldnn.is_available() and any(
        getattr(torch.cpu, supported)() for supported, _ in BFLOAT16_UNITS
    )


def onednn_multiplies() -> bool:
    """Whether products are oneDNN's here, by :func:`exact_products`."""
    return _onednn_multiplies


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x Wᵀ + b`` by oneDNN whatever the process's setting is, which may change in other threads.

    Args:
        x: ``[n, K]``, in float32, or in bfloat16 where :func:`multiplies_bfloat16`.
        weight: ``[N, K]``, of the same dtype.
        bias: ``[N]``, in float32, or None.
    """
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def multiplied_by_onednn() -> bool:
    """Whether :func:`exact_products` gives a CPU's products to oneDNN."""
    untouched = float32_setting() == "highest" and not torch.cuda.is_initialized()
    return untouched and _onednn_is_better()


@functools.cache
def _onednn_is_better() -> bool:
    """Decided by the processor and never by a measurement, so that a fold gives the same bits every time."""
    return (
        torch.backends.mkldnn.is_available()
        and _vendor() == "AuthenticAMD"
        and not torch.cpu._is_amx_tile_supported()
        and _is_exact()
    )


def _vendor() -> str | None:
    """The processor's maker as Linux names it; None where it is not known."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, None)


def _is_exact() -> bool:
    """Whether oneDNN's float32 products are that, tried out on shapes of which it may have kernels of their own."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((512, 256, 128), (37, 100, 129), (1, 64, 64)):
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(inner, columns, generator=generator)
        with _by_onednn():
            found = a @ b
        linear = onednn_linear(a, b.t().contiguous())
        exact = a.double() @ b.double()
        if any((x - exact).abs().max() > _ROUNDING * exact.abs().max() for x in (found, linear)):
            return False
    return True
