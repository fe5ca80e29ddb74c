"""Which memory the programs of Triton's kernels touch, at sizes whose tensors would not fit into any memory here.

Kernels run in Triton's interpreter on tensors of the device ``meta``: an address is compared with the bounds of the
tensors, what is loaded is zero, and products of matrices are not made.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.library import CustomOpDef
from triton.runtime import interpreter

from fastfold.kernels.common.backend import launches_replaced

GAP = 2**44
"""Bytes from one tensor to the next: no offset reaches another by mistake."""

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.bool: tl.int1,
}


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
    def key(self) -> tuple[Any, ...]:
        """What decides which addresses its programs make, relative to the tensors' storages."""
        return self.name, self.grid, str([_summary(x) for x in self.arguments.values()])


def _summary(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_summary, x))
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype
    return x


def launches_of(run: Callable[[], object]) -> list[GridLaunch]:
    """What operators on tensors of the device ``meta`` launch, forward and backward; each once."""
    found: dict[tuple[Any, ...], GridLaunch] = {}
    call = CustomOpDef.__call__

    def keep(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            named = inspect.getfullargspec(kernel.fn).args
            known = dict(zip(named, arguments, strict=False)) | {
                k: x for k, x in options.items() if k in named
            }
            one = GridLaunch(kernel, grid, known)
            found.setdefault(one.key, one)

        return launch

    def made(operator: CustomOpDef, *arguments: Any, **options: Any) -> Any:
        """The operator itself in place of what PyTorch knows of its shapes, which autograd gets forward."""
        with torch.no_grad():
            result = operator._init_fn(*arguments, **options)
        return result if "backward" in operator._qualname else call(operator, *arguments, **options)

    with launches_replaced(keep), mock.patch.object(CustomOpDef, "__call__", made), torch.device("meta"):
        run()
    return list(found.values())


def outside(launch: GridLaunch, programs: int = 3, short: int = 0) -> list[str]:
    """Addresses that programs of a launch touch outside of its tensors, in words; none if it is right.

    Args:
        launch: What is run.
        programs: Of every axis of the grid as many at its ends, and one between.
        short: Elements that every tensor is taken to be shorter: then something has to be found.
    """
    memory = _Memory(short)
    arguments = {
        name: x if _is_constexpr(launch.kernel, name) else memory.converted(name, x)
        for name, x in launch.arguments.items()
    }
    builder = interpreter.interpreter_builder
    function = launch.kernel.rewrite()
    patch_scope = interpreter._patch_lang(function)
    grid = launch.grid + (1,) * (3 - len(launch.grid))
    try:
        with memory.watched(builder), _short_loops(launch.kernel), np.errstate(all="ignore"):
            builder.set_grid_dim(*grid)
            for index in itertools.product(*(_ends(n, programs) for n in grid)):
                builder.set_grid_idx(*index)
                function(**arguments)
    finally:
        patch_scope.restore()
    return [f"{launch.name}: {x}" for x in memory.found]


def _ends(size: int, count: int) -> list[int]:
    return sorted({*range(min(size, count)), size // 2, *range(max(0, size - count), size)})


def _few(*arguments: Any) -> Iterator[int]:
    """Iterations of a loop at its ends, and one between."""
    every = range(*(int(x) for x in arguments))
    return iter([every[i] for i in _ends(len(every), 2)]) if every else iter(())


@contextlib.contextmanager
def _short_loops(kernel: Any) -> Iterator[None]:
    """Inside, loops of kernels run a few times, except where pointers are moved on from one round to the next."""
    with contextlib.ExitStack() as stack:
        if "attention" not in kernel.__name__:
            for name, module in list(sys.modules.items()):
                if name.startswith("fastfold.kernels.") and hasattr(module, "tl"):
                    stack.enter_context(mock.patch.object(module, "range", _few, create=True))
        yield


def _is_constexpr(kernel: Any, name: str) -> bool:
    return inspect.signature(kernel.fn).parameters[name].annotation in (
        tl.constexpr,
        "tl.constexpr",
        "constexpr",
    )


class _Memory:
    """Ranges of addresses of tensors without memory, and what is touched outside of them."""

    def __init__(self, short: int) -> None:
        self._short = short
        self._ranges: dict[int, tuple[int, int, str]] = {}
        self.found: list[str] = []

    def converted(self, name: str, x: Any) -> Any:
        """An argument as the interpreter passes it on."""
        if isinstance(x, tuple):
            names = getattr(x, "_fields", range(len(x)))
            parts = (self.converted(f"{name}.{n}", y) for n, y in zip(names, x, strict=True))
            return interpreter._tuple_create(x, parts)
        if not isinstance(x, Tensor):
            return interpreter._implicit_cvt(x)
        storage = x.untyped_storage()
        start = (len(self._ranges) + 1) * GAP
        start, _, _ = self._ranges.setdefault(
            storage._cdata, (start, start + storage.nbytes() - self._short * x.itemsize, name)
        )
        kind = tl.pointer_type(_TYPES[x.dtype])
        address = np.array([start + x.storage_offset() * x.itemsize], np.uint64)
        return tl.tensor(interpreter.TensorHandle(address, kind), kind)

    @contextlib.contextmanager
    def watched(self, builder: Any) -> Iterator[None]:
        """Inside, loads and stores of the interpreter are compared with the ranges, and products are zero."""

        def load(ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
            self._check(ptrs, mask, "reads")
            kind = ptrs.get_element_ty()
            return interpreter.TensorHandle(np.zeros(ptrs.data.shape, interpreter._get_np_dtype(kind)), kind)

        def store(ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> None:
            self._check(ptrs, mask, "writes")

        def dot(a: Any, b: Any, d: Any, *options: Any) -> Any:
            return d

        with (
            mock.patch.object(builder, "create_masked_load", load),
            mock.patch.object(builder, "create_masked_store", store),
            mock.patch.object(builder, "create_dot", dot),
        ):
            yield

    def _check(self, ptrs: Any, mask: Any, what: str) -> None:
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if not addresses.size:
            return
        size = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
        first, last = int(addresses.min()), int(addresses.max())
        for start, end, name in self._ranges.values():
            if start <= first < start + GAP // 2:
                if last + size > end:
                    self.found.append(f"{what} {last + size - end} bytes behind the end of {name}")
                return
        self.found.append(f"{what} in front of a tensor, or of none, at {first % GAP}")
