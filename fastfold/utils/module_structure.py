"""Structure of a module: paths, a description that processes can compare, copies, and exchange of parts.

Paths of modules and names of their tensors are written as ``blocks.0`` and ``blocks.0.weight``.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastfold.errors import ConfigError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

M = TypeVar("M", bound=nn.Module)
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


def tie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Make the parameters of each group of names one again: the first name's, without names that are gone."""
    for names in tied:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        present = [name for name in names if name in parameters]
        for name in present[1:]:
            replace_at(model, name, parameters[present[0]])


def check_shapes(module: nn.Module) -> None:
    """Refuse a module with parameters or buffers that get their shape in the first forward pass.

    Raises:
        ConfigError: A layer is lazy and has not run yet.
    """
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(x):
            raise ConfigError(
                f"{name} has no shape yet, because its layer is lazy: run the model once with an example input before"
            )


def check_memory(module: nn.Module) -> None:
    """Refuse a module with different parameters, or a parameter and a buffer, in the same memory.

    A change of one would change the other, until one of them is moved or divided.

    Raises:
        ConfigError: Two tensors overlap; names both.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import

    parameters = {id(p) for p in module.parameters()}
    tensors = (*module.named_parameters(), *module.named_buffers())
    named = [(x.data_ptr(), name, x) for name, x in tensors if not isinstance(x, FakeTensor)]
    named = sorted((item for item in named if item[0]), key=lambda item: item[0])  # 0 has no memory
    for i, (start, name, x) in enumerate(named):
        for j in range(i + 1, len(named)):
            other_start, other_name, other = named[j]
            if other_start >= start + _extent(x):
                break
            of_parameter = id(x) in parameters or id(other) in parameters
            if of_parameter and _overlap(x, other, other_start - start):
                raise ConfigError(
                    f"{name} and {other_name} share memory: register one parameter under both names, or give one of "
                    "them a clone()"
                )


def _extent(x: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.itemsize if x.numel() else 0


def _overlap(x: Tensor, other: Tensor, offset: int) -> bool:
    """Return True if two tensors have a common element; ``other`` begins ``offset`` bytes later."""
    if x.itemsize != other.itemsize or offset % x.itemsize:
        return True
    shift = offset // x.itemsize
    places = torch.arange(max(_extent(x), offset + _extent(other)) // x.itemsize)
    own = places.as_strided(x.shape, x.stride()).reshape(-1)
    others = places.as_strided(other.shape, other.stride(), shift).reshape(-1)
    return bool(torch.isin(own, others).any())


def module_structure(module: nn.Module) -> dict[str, str]:
    """Describe every submodule, parameter and buffer of a module, by name.

    Buffers count whether they are saved or not; values are left out.
    """
    parts = {f"module {name}": type(part).__qualname__ for name, part in module.named_modules()}
    for name, p in module.named_parameters(remove_duplicate=False):
        parts[name] = f"{list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    for name, x in module.named_buffers(remove_duplicate=False):
        parts[name] = f"buffer {list(x.shape)} {x.dtype}"
    return parts


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
        buffers: dict[int, Any] = {id(x): make(x.detach()) for x in module.buffers()}
        return buffers | {id(p): nn.Parameter(make(p.detach()), p.requires_grad) for p in module.parameters()}


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a module with parameters and buffers without data."""
    return detached_copy(model, fakes(model, mode))


class _Detached(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not isinstance(args[0], nn.Parameter):
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield all tensors of a module's output: in containers, dataclasses and attributes of plain objects."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            yield from tensors_in(list(vars(leaf).values()))
