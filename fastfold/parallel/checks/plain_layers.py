"""Checks that a cut layer behaves as the plain layer: exact types, no hooks, the same parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fastfold.errors import ConfigError

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
    "_state_dict_hooks": "a state-dict hook",
    "_load_state_dict_pre_hooks": "a state-dict hook",
}

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Signature = dict[str, tuple[Any, ...]]
"""Shape, dtype and ``requires_grad`` of each parameter and buffer by name."""


def require_type(layer: nn.Module, kind: type[nn.Module], maker: str) -> None:
    """Refuse a layer of another class, whose forward pass may do more.

    Subclasses are refused too; the maker is the parallel class in the message.

    Raises:
        ConfigError: The layer is of another class.
    """
    if type(layer) is not kind:
        actual = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise ConfigError(
            f"{maker} expects exactly torch.nn.{kind.__name__}, found {actual}, whose own computation would be lost; "
            "leave this layer out of layers=, or give a function that cuts it and has to_plain()"
        )


def check_unchanged(layer: nn.Module, owner: nn.Module) -> None:
    """Refuse a layer with hooks, parametrizations or a forward of its own instance: a cut would drop them.

    The owner is the module that contains the layer.

    Raises:
        ConfigError: The message names the module inside of the layer and its hook or forward.
    """
    kind = type(owner)
    if kind.__module__.startswith("torch.nn.") and kind not in _CONTAINERS:
        raise ConfigError(
            f"it belongs to torch.nn.{kind.__name__}, which reads attributes of its layers and does not call them as "
            "modules; use a block of your own, or leave this layer out of layers="
        )
    for name, module in layer.named_modules():
        extra = "a parametrization" if is_parametrized(module) else None
        if extra is None:
            extra = next((text for registry, text in _HOOKS.items() if getattr(module, registry)), None)
        if extra is None and "forward" in vars(module):
            extra = "a forward() of its own instance"
        if extra is None and any(
            p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters(recurse=False)
        ):
            extra = "a hook on a parameter"
        if extra is not None:
            place = f"{type(module).__name__} {name} inside of it" if name else type(module).__name__
            raise ConfigError(
                f"{place} has {extra}, which a cut layer would lose; remove it before parallelize(), or leave this "
                "layer out of layers="
            )


def signature(layer: nn.Module) -> Signature:
    """Return shape, dtype and ``requires_grad`` of each parameter and saved buffer."""
    return {
        name: (tuple(x.shape), x.dtype, x.requires_grad)
        for name, x in layer.state_dict(keep_vars=True).items()
        if hasattr(x, "requires_grad")
    }


def check_restored(before: Signature, cut: nn.Module) -> None:
    """Check the result of a cut layer's ``to_plain()`` (a collective).

    ``before`` is the signature of the plain layer, ``cut`` this rank's part of it.

    Raises:
        ConfigError: ``to_plain`` is missing, or its result has other names, shapes, dtypes or ``requires_grad``.
    """
    to_plain = getattr(cut, "to_plain", None)
    if not callable(to_plain):
        raise ConfigError(f"{type(cut).__name__} needs a method to_plain() for checkpoints")
    after = signature(to_plain())
    for name in dict.fromkeys([*before, *after]):
        expected, restored = before.get(name), after.get(name)
        if expected != restored:
            raise ConfigError(
                f"{type(cut).__name__} does not keep {name}: expected {_shown(expected)}, found {_shown(restored)} "
                "from to_plain(); leave this layer out of layers=, or cut it by a function of your own"
            )


def _shown(of_one: tuple[Any, ...] | None) -> str:
    if of_one is None:
        return "nothing"
    shape, dtype, trains = of_one
    return f"{list(shape)} {dtype}{'' if trains else ' frozen'}"
