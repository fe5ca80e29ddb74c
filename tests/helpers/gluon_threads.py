"""Gluon kernels for Hopper on the CPU: each partition of warps is a thread, and layouts are ignored.

Triton's interpreter has no Gluon. Here barriers have phases, a copy to shared memory destroys its target at once and
arrives later, and stores from it happen as late as their waits allow. So a missing wait gives a wrong result or a
deadlock.
"""

from __future__ import annotations

import operator
import struct
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

DEADLOCK_SECONDS = 60.0
BYTE_SECONDS = 1e-7  #: Time of a copy to shared memory
READ_SECONDS = 1e-3  #: Time of a read of shared memory, in which a copy that may not happen yet overwrites it

_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mul": operator.mul,
    "add": operator.add,
    "ex2": torch.exp2,
    "rcp": torch.reciprocal,
}


class Block(torch.Tensor):
    """Values of a partition; its Triton type has a layout, which is None."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Pointer:
    """Elements from the first one of a tensor on, with offsets."""

    def __init__(self, x: Tensor, offsets: Any = 0) -> None:
        self.x, self.offsets = x, offsets

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.x, self.offsets + offsets)

    def load(self, mask: Any, other: float) -> Tensor:
        """Read elements; those outside of the mask are another number."""
        size = self.x.untyped_storage().nbytes() // self.x.itemsize - self.x.storage_offset()
        is_read = torch.as_tensor(True if mask is None else mask).expand_as(self.offsets)
        values = self.x.as_strided((size,), (1,))[torch.where(is_read, self.offsets, 0)]
        return torch.where(is_read, values, torch.full_like(values, other)).as_subclass(Block)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def index(self, i: int) -> Shared:
        return Shared(self.x[i])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.x.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.x.permute(*order))

    def load(self, layout: object) -> Tensor:
        time.sleep(READ_SECONDS)
        return self.x.clone().as_subclass(Block)

    def store(self, x: Tensor) -> None:
        assert x.shape == self.x.shape
        self.x.copy_(x)


class Barrier:
    """Barrier that one arrival and all bytes that it expects complete."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._completed = self._arrivals = self._bytes = 0

    def change(self, arrivals: int, size: int) -> None:
        """Count arrivals, and bytes that are expected (positive) or there (negative)."""
        with self._changed:
            self._arrivals += arrivals
            self._bytes += size
            assert self._arrivals <= 1, "a phase has a second arrival"
            if self._arrivals == 1 and self._bytes == 0:
                self._arrivals, self._completed = 0, self._completed + 1
                self._changed.notify_all()

    def wait(self, phase: int) -> None:
        """Wait until the phase of this parity is complete."""
        with self._changed:
            is_complete = self._changed.wait_for(
                lambda: self._completed % 2 != int(phase), timeout=DEADLOCK_SECONDS
            )
        assert is_complete, "deadlock"


class Barriers:
    """Array of barriers."""

    def __init__(self, count: int) -> None:
        self._barriers = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self._barriers[i]


class _Program:
    """State of the running program, and the functions of Gluon that its partitions call."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self._own = threading.local()

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Any:
        if dtype == torch.int64:
            return Barriers(shape[0]) if len(shape) == 2 else Barrier()
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    def specialize(self, parts: Sequence[tuple[Any, Any]], warps: object, registers: object) -> None:
        errors: list[BaseException] = []

        def run(function: Any, arguments: Any) -> None:
            try:
                self._own.stores = []
                function(*arguments)
                assert not self._own.stores, "a partition ends before its stores"
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def load_tile(self, source: Any, start: Sequence[Any], barrier: Barrier, target: Shared) -> None:
        inside, tile = _inside(source, start)
        size = target.x.numel() * target.x.itemsize
        target.x.fill_(torch.nan)

        def arrive() -> None:
            target.x.zero_()
            target.x[tile] = source.base[inside]
            barrier.change(0, -size)

        threading.Timer(size * BYTE_SECONDS, arrive).start()

    def store_tile(self, target: Any, start: Sequence[Any], source: Shared) -> None:
        inside, tile = _inside(target, start)
        self._own.stores.append(lambda: operator.setitem(target.base, inside, source.x[tile]))

    def store_wait(self, pendings: int) -> None:
        while len(self._own.stores) > pendings:
            self._own.stores.pop(0)()


def _inside(descriptor: Any, start: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the parts of the tensor and of the tile that are within both."""
    sizes = [
        max(0, min(block, size - int(first)))
        for first, block, size in zip(start, descriptor.block_shape, descriptor.shape, strict=True)
    ]
    tensor = tuple(slice(int(first), int(first) + size) for first, size in zip(start, sizes, strict=True))
    return tensor, tuple(slice(size) for size in sizes)


def _product(a: Any, b: Any, start: Tensor, *, use_acc: bool, is_async: bool) -> Tensor:
    x, y = (one.x if isinstance(one, Shared) else one for one in (a, b))
    result = x.float() @ y.float()
    return (result + start if use_acc else result).as_subclass(Block)


def _assembly(text: str, constraints: str, arguments: Sequence[Tensor], **options: Any) -> Tensor:
    """Compute the result of PTX instructions on one operand."""
    registers: dict[str, Any] = {"$1": arguments[0]}
    for instruction in text.strip("{} ").split(";"):
        name, *operands = instruction.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            values = [
                registers[one] if one in registers else struct.unpack(">f", bytes.fromhex(one[2:]))[0]
                for one in operands[1:]
            ]
            registers[operands[0]] = _OPERATIONS[name.split(".")[0]](*values)
    return registers["$0"]  # type: ignore[no-any-return]


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _language(program: _Program) -> dict[str, Any]:
    """Return what a Gluon kernel's module imports, by the names of ``benchmarks/gpu/gluon_tiles.py``."""
    language = SimpleNamespace(
        NVMMADistributedLayout=_nothing,
        DotOperandLayout=_nothing,
        SliceLayout=_nothing,
        float32=torch.float32,
        bfloat16=torch.bfloat16,
        int64=torch.int64,
        program_id=lambda axis: torch.tensor(program.number),
        num_programs=lambda axis: torch.tensor(program.count),
        cdiv=lambda a, b: -(-a // b),
        static_range=range,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        expand_dims=torch.unsqueeze,
        sum=torch.sum,
        rsqrt=torch.rsqrt,
        split=lambda x: x.unbind(-1),
        load=lambda pointer, mask=None, other=0.0: pointer.load(mask, other),
        inline_asm_elementwise=_assembly,
        allocate_shared_memory=program.allocate,
        warp_specialize=program.specialize,
    )
    barriers = SimpleNamespace(
        MBarrierLayout=_nothing,
        init=_nothing,
        wait=lambda barrier, phase: barrier.wait(phase),
        expect=lambda barrier, size: barrier.change(1, size),
        arrive=lambda barrier, *, count: barrier.change(count, 0),
    )
    return {
        "gl": language,
        "mbarrier": barriers,
        "tma": SimpleNamespace(store_wait=program.store_wait),
        "load_tile": program.load_tile,
        "store_tile": program.store_tile,
        "fence_async_shared": _nothing,
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": lambda pendings, deps: deps if len(deps) > 1 else deps[0],
    }


def functions(module: ModuleType, number: int = 0, count: int = 1) -> dict[str, Any]:
    """Return a module's names, with its functions of Gluon as functions of program ``number`` of ``count``."""
    space = dict(vars(module)) | _language(_Program(number, count))
    for name, value in vars(module).items():
        if hasattr(value, "fn"):  # a function of Gluon
            space[name] = FunctionType(value.fn.__code__, space)
        elif type(value).__name__ == "constexpr":
            space[name] = value.value
    return space


def launcher(module: ModuleType) -> Callable[[Any, tuple[int, ...]], Callable[..., None]]:
    """Return a replacement of ``kernel[grid]`` that runs a module's kernels, one program after the other.

    Other kernels are launched as before.
    """
    before = KernelInterface.__getitem__

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        if vars(module).get(kernel.__name__) is not kernel:
            return before(kernel, grid)  # type: ignore[no-any-return]

        def run(*arguments: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
            pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in arguments]
            for number in range(grid[0]):
                functions(module, number, grid[0])[kernel.__name__](*pointers, **constants)

        return run

    return launch
