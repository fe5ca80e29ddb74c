""":func:`quantize` stores the weights of any module in 8 bits, for inference on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import in_trunk, multiply_with_fewer_bits, set_precision
from fastfold.evoformer.primitives import Linear
from fastfold.kernels.cpu.int8_layers import (
    Int8Conv1D,
    Int8Embedding,
    Int8Linear,
    Int8Weight,
    StoredLinear,
    adds_int8_exactly,
    refusal,
)

_MIB = 1 << 20


@dataclass(frozen=True)
class QuantizationReport:
    """Result of :func:`fastfold.quantize`."""

    bytes_before: int  #: Bytes of parameters and buffers before; shared ones count once
    bytes_after: int  #: Bytes of parameters and buffers after
    quantized: tuple[str, ...]  #: Names of the layers in 8 bits
    #: Reason of each layer with parameters that is not in 8 bits, by name
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Largest error of each output over all batches, relative to its norm, by name; empty without batches
    errors: Mapping[str, float] = field(default_factory=dict)
    #: Largest error of each tested layer's output, from its own input, by name
    layer_errors: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{len(self.quantized)} layers in 8 bits: {self.bytes_before / _MIB:,.1f} MiB of parameters before, "
            f"{self.bytes_after / _MIB:,.1f} MiB after"
        ]
        lines += [
            f"output {name or '(the only one)'}: error {error:.2%}" for name, error in self.errors.items()
        ]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            lines.append(f"not in 8 bits: {names[0]}{more}: {reason}")
        return "\n".join(lines)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes that a module's parameters and buffers hold; shared memory counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if not x.is_meta
    }
    return sum(storages.values())


Batch = Tensor | Sequence[Any] | Mapping[str, Any]
"""Arguments of a module: one tensor, positional ones, or ones by name."""
TOLERANCE = 0.05
"""Largest error of a layer's output, relative to its norm, with which the layer is stored in 8 bits."""


def quantize(
    model: nn.Module,
    dtype: str = "int8",
    batches: Sequence[Batch] = (),
    *,
    tolerance: float = TOLERANCE,
    skip: Sequence[str] = (),
) -> QuantizationReport:
    """Store the weights of linear and embedding layers in 8 bits, in place, for inference on a CPU.

    A weight has a scale for each output channel, and the input of a linear layer is rounded with a step for each
    position. Layers of the Evoformer keep two words of 8 bits per weight, and their operators multiply as with the
    precision ``int8``; structure module and heads of an AlphaFold network stay in float32. All parameters that
    remain are frozen.

    Args:
        model: The module, on a CPU.
        dtype: ``int8``.
        batches: Example inputs, by which errors are measured. A layer with a larger error than ``tolerance`` is left
            out, so give typical ones.
        tolerance: See :data:`TOLERANCE`.
        skip: Names of modules to leave out with all their parts.

    Raises:
        ConfigError: The module or an argument is not supported; the module is unchanged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold import quantize
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        >>> report = quantize(model, "int8", [torch.randn(32, 256)])
        >>> report.quantized
        ('0', '2')
        >>> report.bytes_after < 0.3 * report.bytes_before, report.errors[""] < 0.05
        (True, True)
    """
    _check(model, dtype, tolerance, skip)
    before, was_training = stored_bytes(model), model.training
    model.eval()
    try:
        with torch.no_grad():
            return _quantized(model, before, batches, tolerance, skip)
    finally:
        model.train(was_training)


def _quantized(
    model: nn.Module, before: int, batches: Sequence[Batch], tolerance: float, skip: Sequence[str]
) -> QuantizationReport:
    layers, refused = _choose(model, skip)
    stored = _store({id(layer.weight): layer for layer in layers.values()})
    replacements = {name: _replacement(layer, stored) for name, layer in layers.items()}
    watched: dict[str, list[float]] = {}
    with _watch(layers, replacements, watched):
        expected = [_outputs(model, batch) for batch in batches]
    layer_errors = _largest(watched)
    for name, error in layer_errors.items():
        if not error <= tolerance:
            refused[name] = f"its output has an error of {error:.1%}, more than {tolerance:.1%}"
    _drop_partly_shared(layers, refused)
    done = [name for name in layers if name not in refused]
    for name in done:
        model.set_submodule(name, replacements[name])
    model.requires_grad_(False)
    if any(type(module) is StoredLinear for module in model.modules()):
        # The operators of the Evoformer multiply with 8 bits too.
        if isinstance(model, AlphaFold):
            set_precision(model, "int8", least_work=0)
        else:
            multiply_with_fewer_bits(model, "int8")
    errors: dict[str, list[float]] = {}
    for batch, outputs in zip(batches, expected, strict=True):
        results = _outputs(model, batch)
        for name, x in outputs.items():
            errors.setdefault(name, []).append(_relative(results[name], x))
    return QuantizationReport(
        before,
        stored_bytes(model),
        tuple(done),
        refused=refused,
        errors=_largest(errors),
        layer_errors=layer_errors,
    )


def _check(model: nn.Module, dtype: str, tolerance: float, skip: Sequence[str]) -> None:
    if dtype != "int8":
        raise ConfigError(
            f"quantize: expected 'int8', found {dtype!r}; model.to(torch.bfloat16) stores 16 bits"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"quantize: expected a torch.nn.Module, found {type(model).__name__}")
    if isinstance(model, (nn.Linear, nn.Embedding)):
        raise ConfigError("quantize: a single layer cannot be replaced in place; wrap it in nn.Sequential")
    if not adds_int8_exactly():
        raise ConfigError("quantize: int8 sums overflow on this processor")
    if not tolerance > 0:
        raise ConfigError(f"quantize: tolerance must be positive, found {tolerance}")
    names = dict(model.named_modules())
    if unknown := [name for name in skip if name not in names]:
        raise ConfigError(f"quantize: skip has {unknown[0]!r}, which is not the name of a module")
    if any(isinstance(module, Int8Weight) for module in names.values()):
        raise ConfigError("quantize: the module is stored in 8 bits already")


def _choose(model: nn.Module, skip: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers to store by name, and the reason of each other layer with parameters."""
    layers: dict[str, Any] = {}
    refused: dict[str, str] = {}
    exact: tuple[str, ...] = ()
    if isinstance(model, AlphaFold):
        exact = tuple(name for name, child in model.named_children() if not in_trunk(model, child))
    for name, module in model.named_modules(remove_duplicate=False):
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if _is_inside(name, skip):
            refused[name] = "left out by skip"
        elif _is_inside(name, exact):
            refused[name] = "structure module and heads stay in float32"
        elif not name:
            refused["(the module)"] = "its own parameters are not a layer's"
        elif type(module) in _KNOWN or _is_conv1d(module):
            if reason := refusal(module):
                refused[name] = reason
            else:
                layers[name] = module
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            refused[name] = f"{type(module).__name__} may compute something else than {_base(module)}"
        else:
            refused[name] = f"{type(module).__name__} is neither a linear layer nor an embedding"
    _refuse_shared(model, layers, refused)
    return layers, refused


_KNOWN = (nn.Linear, nn.Embedding, Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
"""Types of layers whose computation is known. The last one is a part of :class:`torch.nn.MultiheadAttention`."""


def _is_conv1d(module: nn.Module) -> bool:
    """Return True for the linear layer of transformers' GPT-2, whose weight is ``[K, N]``."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _base(module: nn.Module) -> str:
    return "nn.Linear" if isinstance(module, nn.Linear) else "nn.Embedding"


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in modules)


def _refuse_shared(model: nn.Module, layers: dict[str, Any], refused: dict[str, str]) -> None:
    """Refuse layers whose weight a module that is not stored uses too, because it would be kept twice."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for name, layer in list(layers.items()):
        others = [one for one in owners[id(layer.weight)] if one not in layers]
        if others:
            refused[name] = f"it shares its weight with {others[0] or 'the module'}"
            del layers[name]


def _drop_partly_shared(layers: Mapping[str, Any], refused: dict[str, str]) -> None:
    """Leave out layers whose weight is shared with a layer that is left out."""
    kept = {id(layer.weight): name for name, layer in layers.items() if name in refused}
    for name, layer in layers.items():
        if name not in refused and id(layer.weight) in kept:
            refused[name] = f"it shares its weight with {kept[id(layer.weight)]}"


def _store(layers: Mapping[int, Any]) -> dict[int, Int8Weight]:
    """Return the stored weight of each weight, by identity."""
    return {
        key: Int8Weight(one.weight.t() if _is_conv1d(one) else one.weight, 2 if type(one) is Linear else 1)
        for key, one in layers.items()
    }


def _replacement(layer: Any, stored: Mapping[int, Int8Weight]) -> nn.Module:
    weight = stored[id(layer.weight)]
    if isinstance(layer, nn.Embedding):
        return Int8Embedding(weight)
    kind = StoredLinear if type(layer) is Linear else Int8Conv1D if _is_conv1d(layer) else Int8Linear
    return kind(weight, layer.bias)


@contextmanager
def _watch(
    layers: Mapping[str, Any], replacements: Mapping[str, nn.Module], errors: dict[str, list[float]]
) -> Iterator[None]:
    """Compare each called layer with its replacement on its own inputs."""

    def compare(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            errors.setdefault(name, []).append(_relative(replacements[name](*inputs), output))

        hook.observes = True  # type: ignore[attr-defined]
        return hook

    handles = [layer.register_forward_hook(compare(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _outputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the floating tensors that a module returns, by place."""
    if isinstance(batch, Tensor):
        result = model(batch)
    elif isinstance(batch, Mapping):
        result = model(**batch)
    else:
        result = model(*batch)
    leaves, _ = tree_flatten_with_path(result)
    return {keystr(path): x for path, x in leaves if isinstance(x, Tensor) and x.is_floating_point()}


def _largest(errors: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the largest error of each name; NaN is larger than all numbers."""
    return {name: float(np.max(values)) for name, values in errors.items()}


def _relative(output: Tensor, expected: Tensor) -> float:
    """Return the norm of the error relative to that of the result; NaN if either has values that are not finite."""
    difference = float((output.double() - expected.double()).norm())
    size = float(expected.double().norm())
    return difference / size if size else (0.0 if difference == 0 else float("inf"))
