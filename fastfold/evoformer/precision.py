"""Reduced precision put on a network from outside: in the trunk, float32 everywhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.primitives import LayerNorm
from fastfold.kernels.cpu.linear import Products, reduced_products
from fastfold.kernels.cpu.products import BFLOAT16_UNITS

Precision = Literal["fp32", "bf16", "bf16-products", "int8"]
"""What the trunk computes in:

* ``fp32``: float32;
* ``bf16``: parameters and activations in bfloat16; softmax, statistics and parameters of normalisations in float32;
* ``bf16-products``: float32, but matrix products in bfloat16, except those of attention;
* ``int8``: as ``bf16-products``, but products with weights in 8 bits where these are faster and not too coarse; where
  the processor has no units for bfloat16 most are, and the others in float32.

The last two are for inference on CPUs (:mod:`fastfold.kernels.cpu.linear`).
"""


def in_trunk(model: AlphaFold, child: nn.Module) -> bool:
    """Whether a child of the network runs in reduced precision: embedders and stacks, but not what follows them."""
    return child is not model.structure_module and child is not model.heads


def set_precision(model: AlphaFold, precision: str) -> AlphaFold:
    """Put embedders, extra MSA stack and Evoformer into a precision, in place; what follows stays in float32.

    Args:
        model: The network.
        precision: One of :data:`Precision`; with ``int8`` and ``bf16-products`` the network is for inference alone.

    Raises:
        ConfigError: There is no such precision.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"there is no precision {precision!r}; use {', '.join(get_args(Precision))}")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for module in model.children():
        parameters_to(module, torch.float32 if module in _after_trunk(model) else dtype)
        module.__dict__.pop("forward", None)
        if module not in _after_trunk(model) and precision in _PRODUCTS:
            module.forward = _within(_PRODUCTS[precision], precision, module.forward)
    return model


def parameters_to(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put a module's parameters into a dtype, in place, but those of its normalisations into float32.

    So does the official program, and the kernels read them so.
    """
    module.to(dtype)
    for part in module.modules():
        if isinstance(part, LayerNorm):
            part.to(torch.float32)
    return module


def trunk_dtype(model: AlphaFold) -> torch.dtype:
    """Of the trunk's weights and activations; parameters of normalisations stay in float32."""
    return model.single_projection.weight.dtype


def precision_of(model: AlphaFold) -> Precision:
    """The precision that :func:`set_precision` put a network into."""
    if trunk_dtype(model) == torch.bfloat16:
        return "bf16"
    name: Precision = getattr(model.evoformer.forward, "precision", "fp32")
    return name


def choose_precision(name: str, device: torch.device) -> tuple[Precision, str]:
    """The precision for a device.

    Args:
        name: One of :data:`Precision`, or ``auto``: on a GPU ``bf16`` if it has that; on a CPU ``bf16-products`` if it
            multiplies bfloat16, else ``int8`` if it adds up products of that; else ``fp32``.
        device: Where the network runs.

    Returns:
        The precision, and what speaks for it in a few words.

    Raises:
        ConfigError: The device cannot compute in it, or there is no such precision.
    """
    if name == "auto":
        return _best_precision(device)
    if name not in get_args(Precision):
        raise ConfigError(f"there is no precision {name!r}; use auto, {', '.join(get_args(Precision))}")
    if name in _PRODUCTS and device.type != "cpu":
        raise ConfigError(f"the precision {name} is for CPUs; on {device.type} use bf16 or fp32")
    if name == "int8" and not _int8_is_exact():
        raise ConfigError("sums of int8 products overflow on this processor; use the precision fp32 or bf16")
    return name, "as asked for"  # type: ignore[return-value]


def _best_precision(device: torch.device) -> tuple[Precision, str]:
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "the GPU has bfloat16"
        return "fp32", "the GPU has no bfloat16"
    if device.type != "cpu":
        return "fp32", f"nothing else is known of {device.type}"
    for supported, precision, unit in _UNITS:
        if getattr(torch.cpu, supported)() and (precision != "int8" or _int8_is_exact()):
            return precision, f"the processor has {unit}"
    return "fp32", f"the processor has none of {', '.join(unit for *_, unit in _UNITS)}"


@functools.cache
def _int8_is_exact() -> bool:
    """Whether sums of the largest int8 products are right: without VNNI some processors add them in 16 bits."""
    large = torch.full((64, 256), 127, dtype=torch.int8)
    small = -large
    return bool((torch._int_mm(large, small.t()) == -127 * 127 * 256).all())


_UNITS: tuple[tuple[str, Precision, str], ...] = (
    *((supported, "bf16-products", unit) for supported, unit in BFLOAT16_UNITS),
    ("_is_vnni_supported", "int8", "VNNI"),
)
"""How to ask PyTorch for a unit of the processor, what it is good for, and its name; the best first."""

_PRODUCTS: dict[str, Products] = {"bf16-products": "bf16", "int8": "int8"}
"""Precisions of products alone."""


def _within(products: Products, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"the precision {name} is for inference alone: use torch.no_grad(), or the precision fp32 or bf16"
            )
        elsewhere = {x.device.type for x in args if isinstance(x, Tensor)} - {"cpu", "meta"}
        if elsewhere:
            raise ConfigError(f"the precision {name} is for CPUs; on {elsewhere.pop()} use bf16 or fp32")
        with reduced_products(products):
            return forward(*args, **options)

    wrapped.precision = name  # type: ignore[attr-defined]
    return wrapped


def autocast_trunk(model: AlphaFold, device_type: str, *, cache: bool = True) -> None:
    """Run embedders, extra MSA stack and Evoformer under bfloat16 autocast, in place.

    Parameters stay in float32, and so do structure module, heads and losses, which take the trunk's results in
    float32; the operators keep the statistics of softmax and normalisation in float32 themselves.

    Args:
        model: The network.
        device_type: Where it runs, ``cpu`` or ``cuda``.
        cache: Keep the bfloat16 copies of parameters until the end of the trunk; not where parameters come and go.
    """
    for module in model.children():
        if module not in _after_trunk(model):
            wrap = torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=cache)
            module.forward = wrap(module.forward)


def _after_trunk(model: AlphaFold) -> tuple[nn.Module, ...]:
    """The modules that stay in float32."""
    return model.structure_module, model.heads
