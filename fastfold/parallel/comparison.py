"""Copies of modules without data or history, and comparison of results up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
_SMALL = 1e-2


def detached_copy(tree: T, memo: dict[int, Any] | None = None) -> T:
    """Copy a module, or arguments whose tensors have an autograd history.

    ``memo`` has replacements of objects by their ids, as of :func:`copy.deepcopy`.
    """
    with _Detached():
        return copy.deepcopy(tree, memo)


def without_data(layer: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module with parameters that have a shape and no memory; tied ones stay tied.

    ``memo`` has replacements of objects by their ids, as of :func:`copy.deepcopy`.
    """
    own = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in layer.parameters()}
    return detached_copy(layer, own if memo is None else own | memo)


def fake(x: Tensor) -> Tensor:
    """Return a tensor on the host of the same shape, strides and dtype; without data inside a ``FakeTensorMode``."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def fakes(module: nn.Module, mode: FakeTensorMode, make: Callable[[Tensor], Tensor] = fake) -> dict[int, Any]:
    """Return parameters and buffers without data in place of a module's, by the ids of those."""
    with mode:
        found: dict[int, Any] = {id(x): make(x.detach()) for x in module.buffers()}
        return found | {id(p): nn.Parameter(make(p.detach()), p.requires_grad) for p in module.parameters()}


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a module with parameters and buffers without data."""
    return detached_copy(model, fakes(model, mode))


class _Detached(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not isinstance(args[0], nn.Parameter):
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        return func(*args, **(kwargs or {}))


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
