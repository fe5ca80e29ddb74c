"""Operators of a call as PyTorch's dispatcher sees them.

:class:`OperatorLog` records their kinds at every call, which shows a path that was not compared.
:class:`RepeatableCall` makes two runs of a module comparable, and :class:`OutputLog` finds the operator that makes
their results differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fastfold.parallel.checks.rounding import is_close

_RANDOM = frozenset({"rand", "randn", "rand_like", "randn_like", "bernoulli"}) | frozenset(
    {"bernoulli_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_"}
)
"""Operators that fill a tensor with random numbers."""


_MESSAGES = frozenset({"c10d", "_c10d_functional", "fsdp", "profiler"})
"""Namespaces of operators of other kinds of parallelism."""

_SIZES = frozenset({"size", "sizes", "split_size", "split_sizes"})
"""Names of arguments with shapes."""

_ATTENTION = -1
"""Number of attention, which is left out, among the operators of a run."""


@cache
def is_pointwise(func: OpOverload) -> bool:
    """Return True if an operator acts on single elements."""
    return torch.Tag.pointwise in func.tags


class OperatorLog(TorchDispatchMode):
    """Kinds of the operators that run inside the context.

    Operators on single elements count by their name, others with their dimensions, shifts and flags. Tensors, fractions
    and sizes are left out, which may be others at every call (a mixture of experts).
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[Hashable] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the compiler does not leave out code that runs inside the mode."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.record(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def paused(self) -> AbstractContextManager[object]:
        """Return a context whose operators are left out, those of attention over the ranks or over the whole."""
        is_innermost = _get_current_dispatch_mode() is self
        return _pop_mode_temporarily() if is_innermost else nullcontext()

    def record(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        """Add the kind of an operator."""
        if is_pointwise(func):
            self.kinds.add(func)
        elif (
            func.namespace not in _MESSAGES and func is not torch.ops.aten.detach.default
        ):  # of saved tensors
            own = [args[i] for i in _counted_arguments(func) if i < len(args)]
            more = [x for name, x in kwargs.items() if name not in _SIZES] if kwargs else ()
            self.kinds.add((func, _frozen(own), _frozen(more)))


@cache
def _counted_arguments(func: OpOverload) -> tuple[int, ...]:
    """Return the places of an operator's arguments without shapes."""
    return tuple(i for i, x in enumerate(func._schema.arguments) if x.name not in _SIZES)


def _frozen(values: Any) -> tuple[Hashable, ...]:
    """Return the arguments of an operator that are no tensors and no fractions."""
    return tuple(
        x if (kind := type(x)) is int else _frozen(x) if kind is list or kind is tuple else _constant(x)
        for x in values
    )


def _constant(x: Any) -> Hashable:
    is_plain = x is None or isinstance(x, bool | str | torch.dtype | torch.memory_format)
    return x if is_plain else type(x).__name__


def kind_name(kind: Hashable) -> str:
    """Return the operator's name in a kind of :class:`OperatorLog`."""
    return str(kind[0] if isinstance(kind, tuple) else kind)


class RepeatableCall(OperatorLog):
    """A log inside which random numbers are the same constant, and dropout keeps everything."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.record(func, args, kwargs)
        return self.run(func, args, kwargs or {})

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator without random numbers."""
        name = func._schema.name.removeprefix("aten::")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        return result.fill_(0.5) if name in _RANDOM and result.is_floating_point() else result


@dataclass(frozen=True)
class _Entry:
    """One operator of a run."""

    place: str  #: Path of the module
    operator: OpOverload
    shapes: list[torch.Size]  #: Shapes of its tensors
    sources: list[int]  #: Numbers of the operators that made them
    outputs: list[Tensor]  #: Copies of its results in host memory


class OutputLog(RepeatableCall):
    """Results of every operator that runs inside the context, with the module that runs it.

    Use one for a run on this rank's part, another for a run on the whole, and compare them by :meth:`first_apart`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._entries: list[_Entry] = []
        self._sources = WeakIdKeyDictionary()
        self._path: list[str] = []
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out operators inside the context; results are known to come from attention."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def named(self) -> Iterator[None]:
        """Follow the calls of submodules inside the context."""
        with ExitStack() as hooks:
            for path, part in self._module.named_modules():
                before = part.register_forward_pre_hook(lambda *_, path=path: self._path.append(path))
                after = part.register_forward_hook(lambda *_: self._path.pop() and None)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        shapes = [x.shape for x in inputs]
        sources = [self._sources[x] for x in inputs if x in self._sources]
        result = self.run(func, args, kwargs or {})
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not self._is_paused:
            copies = [x.detach().to("cpu", copy=True) for x in outputs]
            place = self._path[-1] if self._path else ""
            self._entries.append(_Entry(place, func, shapes, sources, copies))
        for x in outputs:
            self._sources[x] = _ATTENTION if self._is_paused else len(self._entries) - 1
        return result

    def first_apart(self, whole: OutputLog, part: tuple[int, int, int]) -> str | None:
        """Return the name of the first operator that has the same inputs in both runs and other results.

        ``part`` is the first position of this rank, the number of its positions, and that of all. Operators on
        positions are preferred to those that make constants.
        """
        is_same: list[bool] = []
        constant = None
        for own, other in zip(self._entries, whole._entries, strict=False):
            if (own.operator, own.place) != (other.operator, other.place):
                return f"{_place(other, whole._module)} runs {_name(other)} on the whole and {_name(own)} on parts"
            is_same.append(
                len(own.outputs) == len(other.outputs)
                and all(_is_part(x, y, part) for x, y in zip(own.outputs, other.outputs, strict=True))
            )
            if is_same[-1] or not all(i != _ATTENTION and is_same[i] for i in own.sources):
                continue
            text = f"{_name(own)} in {_place(own, self._module)}"
            if own.shapes != other.shapes and not is_pointwise(own.operator):
                return f"{text} sees only this rank's part of the sequence"
            constant = constant or f"{text} depends on the length of the sequence or counts positions from 0"
        return constant


def _name(entry: _Entry) -> str:
    return entry.operator._schema.name.replace("::", ".")


def _place(entry: _Entry, module: nn.Module) -> str:
    kind = type(module.get_submodule(entry.place)).__name__
    return f"{entry.place} ({kind})" if entry.place else kind


def _is_part(own: Tensor, whole: Tensor, part: tuple[int, int, int]) -> bool:
    """Return True if a tensor is the rank's part of another, or the same without positions."""
    first, count, length = part
    if own.shape == whole.shape:
        return _equal(own, whole)
    dims = [d for d in range(whole.dim()) if own.dim() == whole.dim() and own.shape[d] != whole.shape[d]]
    if len(dims) != 1 or not count:
        return not count
    ((dim,), size) = dims, own.shape[dims[0]]
    if size * length != whole.shape[dim] * count or size % count:
        return False
    # Positions may be flattened with a batch before them or features after them.
    outer = size // count

    def cut(before: int) -> Tensor:
        unflattened = whole.unflatten(dim, (before, length, outer // before))
        return unflattened.narrow(dim + 1, first, count).flatten(dim, dim + 2)

    return any(_equal(own, cut(before)) for before in range(1, outer + 1) if outer % before == 0)


def _equal(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return torch.equal(x, y)
    return is_close(torch.nan_to_num(x), torch.nan_to_num(y))
