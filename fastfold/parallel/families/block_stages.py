"""Pipeline stages of a model with a list of blocks: ``stages="auto"``.

Every stage runs the model's own ``forward``, so that masks and positions are those of the plain model. Blocks of
earlier stages pass their input on, the first own block gets the tensor of the previous stage, and the pass ends after
the last own block. Modules with parameters that run before the blocks are in the first stage, those after in the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastfold.errors import ConfigError
from fastfold.parallel.families.call_trace import trace_call
from fastfold.parallel.pipeline import split_blocks
from fastfold.utils.module_structure import copy_level, is_inside, joined, without_data

_REMEDY = "give stages= as a function (fastfold.parallel.pipeline), or use dp, zero or tp instead of pp"


def block_stages(model: nn.Module) -> Callable[[nn.Module, int], list[nn.Module]]:
    """Return the function that splits a model and its copies into stages.

    Raises:
        ConfigError: The model has no list of blocks, or its other modules cannot be put before or after them.
    """
    blocks = _find_blocks(model)
    paths = [joined(blocks, str(i)) for i in range(len(_members(model, blocks)))]
    outer = _outer_modules(model, blocks)
    trace = trace_call(model, "stages")
    if [path for path in trace.called if path in paths] != paths:
        raise ConfigError(f'stages="auto": {blocks} are not called once each, in their order; {_REMEDY}')
    outputs = [trace.outputs[path] for path in paths]
    for path, output in zip(paths, outputs, strict=True):
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or trace.sizes[path] != 1:
            raise ConfigError(f'stages="auto": {path} returns other than one tensor; {_REMEDY}')
    owner = blocks
    while owner:
        owner = owner.rpartition(".")[0]
        held = [*model.get_submodule(owner)._parameters, *model.get_submodule(owner)._buffers]
        if held:
            raise ConfigError(
                f'stages="auto": {joined(owner, held[0])} is outside of the modules around {blocks}; {_REMEDY}'
            )
    begin, end = trace.called.index(paths[0]), trace.called.index(paths[-1])
    before, everywhere = list[str](), list[str]()
    for path in outer:
        called = [i for i, name in enumerate(trace.called) if name == path]
        if not model.get_submodule(path).state_dict():
            everywhere.append(path)
        elif called and called[0] < begin:
            before.append(path)
            if called[-1] > end:
                raise ConfigError(
                    f'stages="auto": {path} runs before the blocks {blocks} and after them; {_REMEDY}'
                )
    return _BlockStages(blocks, before, everywhere, outputs)


@dataclass(frozen=True)
class _BlockStages:
    """Function that splits a model and its copies into stages."""

    blocks: str  #: Path of the list of blocks
    before: list[str]  #: Modules of the first stage
    everywhere: list[str]  #: Modules without a state, which every stage calls
    outputs: list[Any]  #: A result of each block, without data

    def __call__(self, model: nn.Module, count: int) -> list[nn.Module]:
        parts = split_blocks(_members(model, self.blocks), count)
        return [self._stage(model, parts, number) for number in range(count)]

    def _stage(self, model: nn.Module, parts: list[list[nn.Module]], number: int) -> nn.Module:
        """Return a copy of the containers with the modules of a stage, and others replaced."""
        is_first, is_last = number == 0, number == len(parts) - 1
        made = _copy_containers(model, self.blocks)
        for path in _outer_modules(model, self.blocks):
            plain = model.get_submodule(path)
            is_own = path in self.everywhere or (is_first if path in self.before else is_last)
            made.set_submodule(path, plain if is_own else _Absent(plain))
        skipped = [_Skipped(self.outputs[i]) for i in range(sum(map(len, parts[:number])))]
        own = [*skipped, *parts[number], *(() if is_last else (_End(),))]
        made.set_submodule(self.blocks, nn.ModuleList(own))
        return _Stage(made, skipped[-1] if skipped else None)


def _find_blocks(model: nn.Module) -> str:
    """Return the path of the outermost list of modules with most parameters."""
    lists = {path: x for path, x in model.named_modules() if isinstance(x, nn.ModuleList) and len(x) > 1}
    outer = {path: x for path, x in lists.items() if not any(is_inside(path, p) for p in lists if p != path)}
    if not outer:
        raise ConfigError(f'stages="auto": {type(model).__name__} has no nn.ModuleList of blocks; {_REMEDY}')
    return max(outer, key=lambda path: sum(p.numel() for p in outer[path].parameters()))


def _members(model: nn.Module, blocks: str) -> list[nn.Module]:
    return list(model.get_submodule(blocks).children())


def _outer_modules(model: nn.Module, blocks: str) -> list[str]:
    """Return the paths of the outermost modules that do not contain the blocks."""
    paths, owner = list[str](), blocks
    while owner:
        inside, owner = owner, owner.rpartition(".")[0]
        children = (joined(owner, name) for name, _ in model.get_submodule(owner).named_children())
        paths += [path for path in children if path != inside]
    return paths


def _copy_containers(model: nn.Module, blocks: str) -> nn.Module:
    """Copy the modules around the blocks; all others are those of the model."""
    made = owner = copy_level(model)
    for name in blocks.split(".")[:-1]:
        owner._modules[name] = inner = copy_level(owner.get_submodule(name))
        owner = inner
    return made


class _Stage(nn.Module):
    """The model's forward pass for own blocks: ``args`` of the first stage, else the tensor that was sent.

    The last stage returns the tensors of the model's output in their order, or the only one.
    """

    def __init__(self, model: nn.Module, entry: _Skipped | None) -> None:
        super().__init__()
        self.model = model
        self._entry = [entry]  # registered in the list of blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (entry,) = self._entry
        if entry is not None:
            (entry.received,) = args
            # Ids give the shape; the result of earlier modules is replaced at the entry.
            args = (torch.zeros(entry.received.shape[:-1], dtype=torch.int64, device=entry.received.device),)
        try:
            output = self.model(*args, **kwargs)
        except _Ended as end:
            return end.hidden
        finally:
            if entry is not None:
                entry.received = None
        # Stages return tensors: those of a dataclass or dictionary in their order, the loss first.
        tensors = (
            [output] if isinstance(output, Tensor) else [x for x in output.values() if isinstance(x, Tensor)]
        )
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


class _Ended(Exception):
    """End of a stage's forward pass."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Skipped(nn.Module):
    """Block of an earlier stage: passes its input on, or as an entry the tensor that the previous stage sent.

    ``output`` is a result of the block, a tensor or a tuple that begins with one.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._rest = None if isinstance(output, Tensor) else output[1:]
        self.received: Tensor | None = None

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
        passed = _first_tensor(hidden, args, kwargs) if self.received is None else self.received
        return passed if self._rest is None else (passed, *self._rest)


class _End(nn.Module):
    """Block after the last own one: ends the pass."""

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise _Ended(_first_tensor(hidden, args, kwargs))


def _first_tensor(hidden: Any, args: Any, kwargs: Any) -> Tensor:
    return next(x for x in (hidden, *args, *kwargs.values()) if isinstance(x, Tensor))


class _Absent(nn.Module):
    """Module of another stage: returns zeros in the shapes of its result, without its parameters."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self._plain = [without_data(plain)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = _first_tensor(None, args, kwargs).device
        args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        with torch.no_grad():
            output = self._plain[0](*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), output)
