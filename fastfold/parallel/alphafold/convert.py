"""Parallel variants of modules: the same parameters under the same names, with another ``forward``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fastfold.errors import ConfigError
from fastfold.utils.module_structure import M, exchange_modules, move_into


def convert_modules(model: M, variants: Mapping[type[nn.Module], type[nn.Module]], **attributes: object) -> M:
    """Replace every module of a class in ``variants`` by its parallel variant, which takes over its attributes.

    Each variant gets the other arguments as attributes.

    Raises:
        ConfigError: A module is parallel already, its ``forward`` was wrapped before, or no module can be converted.
    """
    for name, module in model.named_modules():
        if isinstance(module, tuple(variants.values())):
            raise ConfigError(f"dap: {name or 'the model'} is parallel already; apply it once")
    if not any(type(module) in variants for module in model.modules()):
        raise ConfigError(f"dap: {type(model).__name__} has neither an MSA nor a pair to shard; use sp or tp")
    for name, module in model.named_modules():
        if type(module) in variants and "forward" in vars(module):
            raise ConfigError(
                f"dap: the forward of {name or 'the model'} was wrapped before; make the model parallel first, and "
                "apply autocast and other wrappers afterwards"
            )

    def make(module: nn.Module) -> nn.Module:
        if type(module) not in variants:
            return module
        variant = move_into(variants[type(module)], module)
        variant.compile = _refuse_to_compile  # type: ignore[method-assign]
        for name, value in attributes.items():
            setattr(variant, name, value)
        return variant

    return exchange_modules(model, make)


def _refuse_to_compile(*_: object, **__: object) -> None:
    raise ConfigError(
        "dap: torch.compile cannot trace a message between ranks, so it cannot compile a module on shards; compile the "
        "modules that fastfold.parallel.alphafold.convert.silent_parts() returns"
    )


def silent_parts(module: nn.Module) -> list[nn.Module]:
    """Return the module, or those of its children that send no messages, for ``torch.compile``.

    ``torch.compile`` cannot trace a collective that overlaps with computation. The module is a block of a network,
    before or after :func:`convert_modules`.
    """

    def sends(part: nn.Module) -> bool:
        return any(hasattr(inner, "shards") for inner in part.modules())

    return [part for part in module.children() if not sends(part)] if sends(module) else [module]
