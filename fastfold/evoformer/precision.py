"""Reduced precision of a network's trunk; structure module, heads and losses stay in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.primitives import LayerNorm
from fastfold.evoformer.quantization.least_work import is_faster, work_of
from fastfold.kernels.cpu.int8_layers import adds_int8_exactly
from fastfold.kernels.cpu.linear import Products, reduced_products
from fastfold.kernels.cpu.products import BFLOAT16_UNITS, INT8_UNIT, has_units

Precision = Literal["fp32", "bf16", "bf16-products", "int8"]
"""Precision of the trunk:

* ``fp32``: float32;
* ``bf16``: parameters and activations in bfloat16; softmax, statistics and parameters of normalisations in float32;
* ``bf16-products``: float32 representations; operators compute in bfloat16 from normalisation to residual, or in
  float32 where the representations are small, which is faster (:mod:`~fastfold.evoformer.quantization.least_work`);
* ``int8``: most products in 8 bits, the others in float32; on processors with bfloat16 units ``bf16-products``.

The last two are for inference on CPUs (:mod:`fastfold.kernels.cpu.linear`). They are float32 on processors without
units for them (:func:`about_missing_units`).
"""


def in_trunk(model: AlphaFold, child: nn.Module) -> bool:
    """Return True for children in the trunk (embedders, stacks), False for structure module and heads."""
    return child is not model.structure_module and child is not model.heads


def set_precision(model: AlphaFold, precision: str, *, least_work: float | None = None) -> AlphaFold:
    """Set the precision of embedders, extra MSA stack and Evoformer, in place.

    Structure module and heads stay in float32.

    ``int8`` and ``bf16-products`` are for inference only. Calls below ``least_work`` stay in float32: elements of their
    representations times channels, by default as measured on this processor.

    Raises:
        ConfigError: The name is not a precision, or the model is not an AlphaFold network.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"expected a precision ({', '.join(get_args(Precision))}), found {precision!r}")
    if not hasattr(model, "structure_module"):
        raise ConfigError(
            f"set_precision is for AlphaFold networks, found {type(model).__name__}; fastfold.quantize(model, 'int8') "
            "stores any module in 8 bits, and model.to(torch.bfloat16) casts it"
        )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def pays(representations: Sequence[Tensor]) -> bool:
        if least_work is not None:
            return work_of(representations) >= least_work
        trunk = model.config.model.embeddings_and_evoformer
        return is_faster(representations, trunk, _PRODUCTS[precision])

    for module in model.children():
        parameters_to(module, dtype if in_trunk(model, module) else torch.float32)
        module.__dict__.pop("forward", None)
        if in_trunk(model, module) and precision in _PRODUCTS:
            multiply_with_fewer_bits(module, precision, pays)
    return model


def parameters_to(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module's parameters to a dtype, in place, and those of its normalisations to float32.

    The official program does the same, and the kernels expect it.
    """
    module.to(dtype)
    for part in module.modules():
        if isinstance(part, LayerNorm):
            part.to(torch.float32)
    return module


def trunk_dtype(model: AlphaFold) -> torch.dtype:
    """Return the dtype of the trunk's weights and activations; normalisation parameters stay in float32."""
    return model.single_projection.weight.dtype


def element_size(precision: str | None) -> int:
    """Return the bytes per element of a trunk in a precision; None for float32."""
    return 2 if precision == "bf16" else 4


def precision_of(model: AlphaFold) -> Precision:
    """Return the precision that :func:`set_precision` gave a network."""
    if trunk_dtype(model) == torch.bfloat16:
        return "bf16"
    name: Precision = getattr(model.evoformer.forward, "precision", "fp32")
    return name


def choose_precision(name: str, device: torch.device) -> tuple[Precision, str]:
    """Choose the precision for a device, and give the reason for it in a few words.

    Args:
        name: One of :data:`Precision`, or ``auto``: ``bf16`` on a GPU that supports it; on a CPU ``bf16-products``
            with bfloat16 units, else ``int8`` with VNNI; otherwise ``fp32``.
        device: Device of the network.

    Raises:
        ConfigError: The device does not support the precision, or the name is not a precision.
    """
    if name == "auto":
        if device.type == "cuda":
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bf16", "the GPU has bfloat16"
            return "fp32", "the GPU has no bfloat16"
        if device.type != "cpu":
            return "fp32", f"the default on {device.type}"
        for supported, precision, unit in _UNITS:
            if getattr(torch.cpu, supported)() and (precision != "int8" or adds_int8_exactly()):
                return precision, f"the processor has {unit}"
        return "fp32", f"the processor has none of {', '.join(unit for *_, unit in _UNITS)}"
    if name not in get_args(Precision):
        raise ConfigError(f"expected a precision (auto, {', '.join(get_args(Precision))}), found {name!r}")
    if name in _PRODUCTS and device.type != "cpu":
        raise ConfigError(f"precision {name} runs on CPUs only; on {device.type} use bf16 or fp32")
    if name == "int8" and not adds_int8_exactly():
        raise ConfigError("int8 sums overflow on this processor; use precision fp32 or bf16")
    return name, "as requested"  # type: ignore[return-value]


def about_missing_units(precision: str, device: torch.device) -> str:
    """Return a warning if the processor has no units for a precision; empty if it has, or for another device.

    Args:
        precision: One of :data:`Precision`.
        device: Device of the network.
    """
    if device.type != "cpu" or precision == "fp32" or has_units("int8" if precision == "int8" else "bf16"):
        return ""
    units = [unit for *_, unit in _UNITS if unit != INT8_UNIT[1] or precision == "int8"]
    missing = f"the processor has none of {', '.join(units)}"
    if precision == "bf16":
        return f"warning: precision bf16 halves the memory and is several times slower than fp32: {missing}"
    return f"warning: precision {precision} is float32 here: {missing}"


_UNITS: tuple[tuple[str, Precision, str], ...] = (
    *((supported, "bf16-products", unit) for supported, unit in BFLOAT16_UNITS),
    (INT8_UNIT[0], "int8", INT8_UNIT[1]),
)
"""PyTorch's test for a unit of the processor, the precision that needs it, and its name; best first."""

_PRODUCTS: dict[str, Products] = {"bf16-products": "bf16", "int8": "int8"}
"""Precisions that apply to products only."""


def multiply_with_fewer_bits(
    module: nn.Module, precision: str, pays: Callable[[Sequence[Tensor]], bool] = lambda representations: True
) -> None:
    """Let the operators of a module's forward pass multiply with fewer bits, in place.

    ``pays`` tells from the representations ``[*, rows, columns, channels]`` of a call if fewer bits are faster.
    """
    forward = type(module).forward

    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"precision {precision} is for inference only; use torch.no_grad(), or precision fp32 or bf16"
            )
        unsupported = {x.device.type for x in args if isinstance(x, Tensor)} - {"cpu", "meta"}
        if unsupported:
            raise ConfigError(
                f"precision {precision} runs on CPUs only; on {unsupported.pop()} use bf16 or fp32"
            )
        if not pays([x for x in args if isinstance(x, Tensor) and x.dim() >= 3]):
            return forward(self, *args, **options)
        with reduced_products(_PRODUCTS[precision]):
            return forward(self, *args, **options)

    wrapped.precision = precision  # type: ignore[attr-defined]
    # A method, because a copy of the module binds it to the copy.
    module.forward = MethodType(wrapped, module)


def autocast_trunk(model: AlphaFold, device_type: str, *, cache: bool = True) -> None:
    """Run embedders, extra MSA stack and Evoformer under bfloat16 autocast, in place.

    Parameters, structure module, heads and losses stay in float32. The operators keep the statistics of softmax and
    normalisation in float32.

    Args:
        model: The network.
        device_type: Device of the network, ``cpu`` or ``cuda``.
        cache: Keep the bfloat16 copies of parameters until the end of the trunk. False if parameters are offloaded.
    """
    for module in model.children():
        if in_trunk(model, module):
            wrap = torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=cache)
            module.forward = wrap(module.forward)
