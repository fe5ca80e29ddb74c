"""Structure of a module: a description that processes can compare, and exchange of parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

M = TypeVar("M", bound=nn.Module)


def module_structure(module: nn.Module) -> dict[str, str]:
    """Describe every submodule, parameter and buffer of a module, by name.

    Buffers count whether they are saved or not; values are left out.
    """
    found = {f"module {name}": type(part).__qualname__ for name, part in module.named_modules()}
    for name, p in module.named_parameters(remove_duplicate=False):
        found[name] = f"{list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    for name, x in module.named_buffers(remove_duplicate=False):
        found[name] = f"buffer {list(x.shape)} {x.dtype}"
    return found


def digest(facts: Mapping[str, str]) -> str:
    """Return a short digest of facts in their order."""
    return f"{len(facts)}-{zlib.crc32(repr(list(facts.items())).encode()):08x}"


def differences(own: Mapping[str, str], other: Mapping[str, str], rank: int, other_rank: int) -> str:
    """Say how the facts of two processes differ, the first three of them."""
    names = [name for name in dict.fromkeys([*own, *other]) if own.get(name) != other.get(name)]
    shown = [
        f"{name} is {own.get(name, 'absent')} on rank {rank} and {other.get(name, 'absent')} on rank {other_rank}"
        for name in names[:3]
    ]
    return "; ".join(shown or ["they are in another order"]) + (" ..." if len(names) > 3 else "")


def move_into(kind: type[M], module: nn.Module) -> M:
    """Return a module of class ``kind`` with all attributes of ``module``, which is left empty.

    Parameters, submodules, hooks and their names stay; any later use of ``module`` raises an AttributeError.
    """
    made = kind.__new__(kind)
    made.__dict__, module.__dict__ = module.__dict__, {}
    return made


def copy_level(module: M) -> M:
    """Copy a module with the same tensors and submodules, so that these may be replaced in the copy."""
    made = object.__new__(type(module))  # FSDP2's class would call __init__
    made.__dict__ = dict(module.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):
        made.__dict__[registry] = dict(module.__dict__[registry])
    return made


def shallow_copy(module: M) -> M:
    """Copy a module and its submodules with the same tensors, so that these may be replaced in the copy."""
    made = copy_level(module)
    made._modules = {name: child and shallow_copy(child) for name, child in module._modules.items()}
    return made


def exchange_modules(model: M, make: Callable[[nn.Module], nn.Module]) -> M:
    """Replace modules everywhere they are registered in a model, in place; return it or its replacement.

    ``make`` returns a module's replacement, or the module itself.
    """
    paths = list(model.named_modules(remove_duplicate=False))
    made = {module: make(module) for module in dict.fromkeys(module for _, module in paths)}
    for path, module in paths[1:]:
        if made[module] is not module:
            made[model].set_submodule(path, made[module])
    return cast(M, made[model])


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield all tensors of a module's output: in containers, dataclasses and attributes of plain objects."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            yield from tensors_in(list(vars(leaf).values()))
