"""What operators would launch at sizes whose tensors would not fit into any memory here: on the device ``meta``.

Operators that take blocks of rows in turn have thousands of launches that differ only in where in their storages the
tensors begin. They are one class. An address is what a tensor begins at plus what is the same in all of the class, so
those that have the lowest or the highest offset of any tensor reach the first and the last byte that any of them does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.library import CustomOpDef

from benchmarks.kernels.recording import launches_replaced


@dataclass(frozen=True)
class GridLaunch:
    """A launch of a kernel with the number of its programs, and the arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Elements in front of each tensor in its storage."""
        return tuple(x.storage_offset() for x in _leaves(self.arguments.values()) if isinstance(x, Tensor))

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides, but for the offsets, which addresses its programs make within the tensors' storages."""
        return self.name, self.grid, tuple(map(_summary, _leaves(self.arguments.values())))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for x in values:
        if isinstance(x, tuple):
            yield from _leaves(x)
        else:
            yield x


def _summary(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()
    return x


def launches_of(run: Callable[[], object]) -> list[GridLaunch]:
    """What operators on tensors of the device ``meta`` launch, forward and backward; of each class its extremes."""
    found: dict[tuple[Any, ...], dict[tuple[int, ...], GridLaunch]] = {}
    call = CustomOpDef.__call__
    names_of = functools.cache(lambda function: tuple(inspect.signature(function).parameters))

    def keep(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            named = names_of(kernel.fn)
            known = dict(zip(named, arguments, strict=False)) | {
                k: x for k, x in options.items() if k in named
            }
            one = GridLaunch(kernel, grid, known)
            found.setdefault(one.key, {}).setdefault(one.offsets, one)

        return launch

    def made(operator: CustomOpDef, *arguments: Any, **options: Any) -> Any:
        """The operator itself in place of what PyTorch knows of its shapes, which autograd gets forward."""
        with torch.no_grad():
            result = operator._init_fn(*arguments, **options)
        return result if "backward" in operator._qualname else call(operator, *arguments, **options)

    with launches_replaced(keep), mock.patch.object(CustomOpDef, "__call__", made), torch.device("meta"):
        run()
    return [launch for members in found.values() for launch in _extremes(members)]


def _extremes(members: Mapping[tuple[int, ...], GridLaunch]) -> Iterator[GridLaunch]:
    """Launches of a class, by the offsets of their tensors, that have the lowest or the highest of one of these."""
    if len(members) == 1:
        yield from members.values()
        return
    tensors = range(len(next(iter(members))))
    ends = [choose(members, key=lambda x, n=n: x[n]) for n in tensors for choose in (min, max)]
    yield from (members[offsets] for offsets in dict.fromkeys(ends))
