"""Which memory the programs of Triton's kernels touch, at sizes whose tensors would not fit into any memory here.

Kernels run in Triton's interpreter on tensors of the device ``meta``: an address is compared with the bounds of the
tensors, what is loaded is zero, and products of matrices are not made.

Not every program runs, and not every round of a loop. An address is a sum of indices of the program and the round, each
times a stride that is not negative, so its extremes are those of the first and the last program and round. The last
program has the block that is cut, the last but one whole ones. Where attention moves pointers on from one round to
the next, three rounds run: their addresses must move by equal steps, from offsets of 64 bits alone, which gives those
of the last round.

An index of 32 bits that wraps around could come back into bounds at the ends and be outside between, so it is no
address that tells: every sum, difference and product of 32 bits is made in 64 too, and must be the same. As what they
are made of only grows with the program and the round, one that wraps around anywhere does so at the last.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tests.helpers.grid_launches import GridLaunch

GAP = 2**44
"""Bytes from one tensor to the next: no offset reaches another by mistake."""

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.bool: tl.int1,
}


class _Access(NamedTuple):
    """What a load or a store touches: which addresses, where its mask lets it, and bytes of an element."""

    what: str
    addresses: Any
    mask: Any
    size: int

    @classmethod
    def of(cls, what: str, ptrs: Any, mask: Any) -> _Access:
        """Those of a call of the interpreter."""
        size = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
        return cls(what, ptrs.data.astype(np.int64), np.broadcast_to(mask.data, ptrs.data.shape), size)


def outside(
    launch: GridLaunch, programs: int = 3, short: int = 0, loaded: Mapping[str, float] | None = None
) -> list[str]:
    """Addresses that programs of a launch touch outside of its tensors, in words; none if it is right.

    Args:
        launch: What is run.
        programs: Of every axis of the grid as many at its ends, and one between.
        short: Elements that every tensor is taken to be shorter: then something has to be found.
        loaded: What is loaded from tensors of these names, in the place of zeros.
    """
    return visited(launch, programs, short, loaded).found


def visited(
    launch: GridLaunch,
    programs: int = 3,
    short: int = 0,
    loaded: Mapping[str, float] | None = None,
    *,
    all_rounds: bool = False,
) -> Memory:
    """The memory after programs of a launch ran; arguments as of :func:`outside`, and whether loops run completely."""
    memory = Memory(short, loaded or {})
    arguments = {
        name: x if _is_constexpr(launch.kernel, name) else memory.converted(name, x)
        for name, x in launch.arguments.items()
    }
    builder = interpreter.interpreter_builder
    function = launch.kernel.rewrite()
    patch_scope = interpreter._patch_lang(function)
    grid = launch.grid + (1,) * (3 - len(launch.grid))
    try:
        loops = contextlib.nullcontext() if all_rounds else _short_loops(launch.kernel, memory)
        with memory.watched(builder), loops, np.errstate(all="ignore"):
            builder.set_grid_dim(*grid)
            for index in itertools.product(*(_ends(n, programs) for n in grid)):
                builder.set_grid_idx(*index)
                function(**arguments)
    finally:
        patch_scope.restore()
    memory.found = [f"{launch.name}: {x}" for x in dict.fromkeys(memory.found)]
    return memory


def _ends(size: int, count: int) -> list[int]:
    return sorted({*range(min(size, count)), size // 2, *range(max(0, size - count), size)})


def _few(*arguments: Any) -> Iterator[int]:
    """Iterations of a loop at its ends, and one between."""
    every = range(*(int(x) for x in arguments))
    return iter([every[i] for i in _ends(len(every), 2)]) if every else iter(())


@contextlib.contextmanager
def _short_loops(kernel: Any, memory: Memory) -> Iterator[None]:
    """Inside, loops of kernels run a few times; those of attention as :meth:`Memory.first_rounds` says."""
    rounds = memory.first_rounds if "attention" in kernel.__name__ else _few
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(("fastfold.kernels.", "tests.kernels.")) and hasattr(module, "tl"):
                stack.enter_context(mock.patch.object(module, "range", rounds, create=True))
        yield


def _is_constexpr(kernel: Any, name: str) -> bool:
    return inspect.signature(kernel.fn).parameters[name].annotation in (
        tl.constexpr,
        "tl.constexpr",
        "constexpr",
    )


class Memory:
    """Ranges of addresses of tensors without memory, and what is touched outside of them.

    Args:
        short: Elements that every tensor is taken to be shorter.
        loaded: What is loaded from tensors of these names, in the place of zeros.

    Attributes:
        found: What was outside, in words.
        accesses: Loads and stores that were made.
        extremes: First and last byte that was touched, by tensor, counted from the beginning of its storage.
    """

    def __init__(self, short: int, loaded: Mapping[str, float]) -> None:
        self._short, self._loaded = short, loaded
        self._ranges: dict[int, tuple[int, int, str]] = {}
        self._round: list[_Access] | None = None
        self._offsets: list[tuple[int, Any]] = []
        self.found: list[str] = []
        self.accesses = 0
        self.extremes: dict[str, tuple[int, int]] = {}

    def converted(self, name: str, x: Any) -> Any:
        """An argument as the interpreter passes it on."""
        if isinstance(x, tuple):
            names = getattr(x, "_fields", range(len(x)))
            parts = (self.converted(f"{name}.{n}", y) for n, y in zip(names, x, strict=True))
            return interpreter._tuple_create(x, parts)
        if not isinstance(x, Tensor):
            return interpreter._implicit_cvt(x)
        assert all(step >= 0 for step in x.stride()), "the extremes are elsewhere"
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
        add, combine = builder.create_addptr, builder.binary_op

        # Versions of Triton differ in what they say of caches.
        def load(ptrs: Any, mask: Any, other: Any, *caching: Any) -> Any:
            name = self._check(_Access.of("reads", ptrs, mask))
            kind = ptrs.get_element_ty()
            data = np.zeros(ptrs.data.shape, interpreter._get_np_dtype(kind))
            if name in self._loaded:
                data = interpreter._convert_float(
                    np.full(data.shape, self._loaded[name], np.float32), tl.float32, kind, None
                ).view(data.dtype)
            return interpreter.TensorHandle(data, kind)

        def store(ptrs: Any, value: Any, mask: Any, *caching: Any) -> None:
            self._check(_Access.of("writes", ptrs, mask))

        def binary_op(left: Any, right: Any, operation: Any) -> Any:
            result = combine(left, right, operation)
            if left.dtype.scalar == tl.int32 and operation in (np.add, np.subtract, np.multiply):
                exact = operation(left.data.astype(np.int64), right.data.astype(np.int64))
                if (exact != result.data).any():
                    self.found.append("an index of 32 bits wraps around")
            return result

        def addptr(ptr: Any, offset: Any) -> Any:
            if self._round is not None:
                self._offsets.append((offset.dtype.primitive_bitwidth, offset.data))
            return add(ptr, offset)

        def dot(a: Any, b: Any, d: Any, *options: Any) -> Any:
            return d

        with (
            mock.patch.object(builder, "create_masked_load", load),
            mock.patch.object(builder, "create_masked_store", store),
            mock.patch.object(builder, "binary_op", binary_op),
            mock.patch.object(builder, "create_addptr", addptr),
            mock.patch.object(builder, "create_dot", dot),
        ):
            yield

    def first_rounds(self, *arguments: Any) -> Iterator[int]:
        """Three rounds of a loop that counts by one, from which follows the last; all of a loop in larger steps.

        The latter cut their last block by the index, and have next to nothing to do.
        """
        every = range(*(int(x) for x in arguments))
        if every.step != 1 or len(every) <= 3:
            yield from every
            return
        rounds, offsets = [], []
        for i in every[:3]:
            self._round, self._offsets = [], []
            yield i
            rounds.append(self._round)
            offsets.append(self._offsets)
        self._round = None
        for parts in zip(*offsets, strict=True):
            if parts[0][0] < 64 and any((parts[0][1] != x[1]).any() for x in parts[1:]):
                self.found.append("a loop moves on by an offset of 32 bits")
        for first, second, third in zip(*rounds, strict=True):
            step = second.addresses - first.addresses
            if (third.addresses - second.addresses != step).any() or (first.mask != third.mask).any():
                self.found.append(f"{first.what} at addresses that move by unequal steps")
            self._check(third._replace(addresses=third.addresses + step * (len(every) - 3)))

    def _check(self, access: _Access) -> str | None:
        """Compare what is touched with the ranges; gives the name of its tensor."""
        if self._round is not None:
            self._round.append(access)
        self.accesses += 1
        addresses = access.addresses[access.mask]
        if not addresses.size:
            return None
        first, last = int(addresses.min()), int(addresses.max())
        for start, end, name in self._ranges.values():
            if start <= first < start + GAP // 2:
                if last + access.size > end:
                    self.found.append(
                        f"{access.what} {last + access.size - end} bytes behind the end of {name}"
                    )
                low, high = self.extremes.get(name, (first - start, 0))
                self.extremes[name] = min(low, first - start), max(high, last + access.size - start)
                return name
        self.found.append(f"{access.what} in front of a tensor, or of none, at {first % GAP}")
        return None
