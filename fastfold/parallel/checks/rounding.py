"""Comparison of results up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
_SMALL = 1e-2


def is_close(x: Tensor, y: Tensor, scale: float = 0.0) -> bool:
    """Return True if tensors are equal up to rounding of the narrower type that autocast may have used.

    ``scale`` is the size of other numbers, whose rounding errors may be the whole of the expected ``x``.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    coarse = dtype == torch.float32 and x.is_cuda and torch.get_float32_matmul_precision() != "highest"
    tolerance = 1e-2 if coarse else _TOLERANCES.get(dtype, 5e-2)
    return not x.numel() or float((x - y).abs().max()) <= tolerance * max(float(x.abs().max()), scale)


@contextmanager
def without_small_weights(module: nn.Module) -> Iterator[None]:
    """Replace a module's weights near zero by random ones inside the context, so that none hides earlier layers."""
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[Tensor, Tensor | None]] = []
    with torch.no_grad():
        for parameter in module.parameters():
            p = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            if p.is_floating_point() and p.numel() and (largest := float(p.abs().max())) < _SMALL:
                kept.append((p, p.clone() if largest else None))
                scale = 1.0 if p.dim() < 2 else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator).mul_(scale))
        try:
            yield
        finally:
            for p, before in kept:
                p.zero_() if before is None else p.copy_(before)
