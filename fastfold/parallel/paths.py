"""Paths of modules and names of their tensors, such as ``blocks.0`` and ``blocks.0.weight``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def is_inside(name: str, path: str) -> bool:
    """Return True if a name is a path, or belongs to the module there; the empty path contains all."""
    return not path or name == path or name.startswith(f"{path}.")


def joined(path: str, name: str) -> str:
    """Return the name of a tensor or module of the module at a path."""
    return f"{path}.{name}" if path and name else path or name


def below(path: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values of the module at a path, by their names inside it."""
    return {name[len(path) :].removeprefix("."): x for name, x in values.items() if is_inside(name, path)}


def replace_at(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    """Replace a submodule or parameter of a model."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, value)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [alike for alike in names.values() if len(alike) > 1]
