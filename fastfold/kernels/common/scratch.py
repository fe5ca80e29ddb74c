"""Blocks that fit into the cache, in buffers that are reused, for the operators' PyTorch paths.

New memory costs a page fault for every 4 KiB, and the C library returns freed blocks of this size to the system
(``benchmarks/results/choices.md`` has times). So every operator works on blocks, in buffers that live as long as the
call, and writes only its result to new memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

# Elements of the largest buffer of a block. 4 MiB of float32 stay in the second-level caches of two cores, and
# matrices of this size still reach the full rate of the matrix product.
BLOCK_ELEMENTS = 2**20

# Positions in bfloat16 up to which an operator works on a single block, so that all threads share each product: these
# products are so fast that Python would start those of several blocks too slowly.
ONE_BLOCK = 4096


class Scratch:
    """Buffers of an operator call by name; the next use of a name overwrites the last.

    An operator makes its own and drops it when it returns. A scratch that is passed to successive calls keeps its
    buffers for all of them.
    """

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.buffers: dict[str, Tensor] = {}
        self._kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        self._threads: dict[int, Scratch] = {}

    def of(self, x: Tensor | Scratch, dtype: torch.dtype | None = None) -> Scratch:
        """Return the same buffers for the device of ``x``, in its dtype or in ``dtype``."""
        dtype = x.dtype if dtype is None else dtype
        if self.dtype == dtype and self.device == x.device:
            return self
        scratch = Scratch(x.device, dtype)
        self._kinds.setdefault((self.dtype, self.device), self.buffers)
        scratch._kinds, scratch._threads = self._kinds, self._threads
        scratch.buffers = self._kinds.setdefault((dtype, x.device), scratch.buffers)
        return scratch

    def of_thread(self, index: int) -> Scratch:
        """Return the buffers of thread ``index``, for operators that share work among threads; thread 0 has these."""
        if index == 0:
            return self
        return self._threads.setdefault(index, Scratch()).of(
            torch.empty((), device=self.device, dtype=self.dtype)
        )

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous tensor of any content in the buffer ``name``."""
        buffer = self.buffers.get(name)
        # Most blocks have one shape, and a view costs the host time.
        if buffer is not None and buffer.shape == shape:
            return buffer
        size = math.prod(shape)
        if buffer is not None and buffer.numel() >= size:
            return buffer.view(-1)[:size].view(shape)
        buffer = self.buffers[name] = torch.empty(shape, device=self.device, dtype=self.dtype)
        return buffer

    def copy(self, name: str, x: Tensor) -> Tensor:
        """Copy ``x`` into the buffer ``name``, contiguous."""
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = x.to(self.device, self.dtype, copy=True, memory_format=torch.contiguous_format)
            self.buffers[name] = buffer
            return buffer
        return (buffer if buffer.shape == x.shape else self(name, *x.shape)).copy_(x)

    def contiguous(self, name: str, x: Tensor) -> Tensor:
        """Return ``x`` if it has no gaps and this dtype, else a copy in the buffer ``name``; for reading only."""
        return x if x.dtype == self.dtype and x.is_contiguous() else self.copy(name, x)

    def transpose(self, name: str, x: Tensor) -> Tensor:
        """Copy ``x.t()`` into the buffer ``name``, contiguous; rows of the matrix ``x`` may be far apart."""
        # Reading a column directly would take one cache line from every row, most often all for the same place in the
        # cache. A contiguous copy comes first, because PyTorch transposes matrices without gaps tile by tile.
        return self.copy(name, (x if x.is_contiguous() else self.copy(f"{name} before", x)).t())


def accumulation_dtype(x: Tensor | torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and sums for data like ``x``: float32, or float64 for float64."""
    dtype = x if isinstance(x, torch.dtype) else x.dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def share_of(summands: int, dtype: torch.dtype) -> float:
    """Return a factor of sums of products with which float16 holds them wherever it holds their mean."""
    # The factor is a power of two, so it is exact. It is 1 for dtypes that hold large numbers.
    return 1.0 if dtype != torch.float16 else 0.5 ** max(0, summands - 1).bit_length()


autocast_is_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Return True if autocast is on for any device; if not, callers leave out :func:`without_autocast`, to save time."""


def without_autocast(function: Callable[..., Any]) -> Any:
    """Run a function in the dtypes of its tensors, whatever autocast asks for."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        if not autocast_is_enabled():
            return function(*args, **options)
        device = ""
        for x in args:
            first = x[0] if isinstance(x, list | tuple) and x else x
            if isinstance(first, Tensor):
                device = first.device.type
                break
        if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
            return function(*args, **options)
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return wrapped


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise a RuntimeError if autograd would have to record an operator that writes into ``out``."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError(
            "out= records no gradients: call the operator without it, or under torch.no_grad()"
        )


def finish(out: Tensor, update: Tensor, residual: Tensor | None, dropout: Tensor | None) -> None:
    """Write ``residual + dropout * update`` of one block to ``out``, maybe the residual; overwrites ``update``."""
    if dropout is not None:
        update.mul_(dropout)
    if residual is None:
        out.copy_(update)
    else:
        torch.add(residual, update, out=out)


@functools.lru_cache  # a cached call takes the host less time
def block_positions(channels: int) -> int:
    """Return the number of positions per block, for a widest buffer of ``channels``."""
    # At most 1,024: the gradients of a normalisation's parameters are summed position by position within a block, and
    # rounding errors grow with the length of that sum.
    return max(1, min(1024, BLOCK_ELEMENTS // channels))


def gradient_positions(channels: int, positions: int, dtype: torch.dtype) -> int:
    """Return the number of positions per block of a backward pass in ``dtype`` over ``positions`` in all."""
    if dtype != torch.bfloat16:
        return block_positions(channels)
    # Rounding errors of the data are larger than those of sums.
    return ONE_BLOCK if positions <= ONE_BLOCK else 2 * block_positions(channels)


def position_blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over blocks ``[n, c_t]`` of at most ``size`` positions of tensors ``[*, c_t]`` with equal leading axes.

    Strides may be any, and nothing is copied. The positions are in row-major order.
    """
    flat: list[Tensor] = []
    last = None
    for t in tensors:
        if not (t.is_contiguous() or _is_mergeable(t)):  # the outermost axis by index
            outermost = zip(*(t.unbind(0) for t in tensors), strict=True)
            return chain.from_iterable(position_blocks(size, *parts) for parts in outermost)
        if t is last:  # input, residual and result may be one tensor, and a view costs the host time
            flat.append(flat[-1])
        else:
            flat.append(t if t.dim() == 2 else t.view(math.prod(t.shape[:-1]), t.shape[-1]))
        last = t
    if flat[0].shape[0] <= size:
        return iter((tuple(flat),))
    return zip(*(t.split(size) for t in flat), strict=True)


def _is_mergeable(x: Tensor) -> bool:
    """Return True if the leading axes of ``x`` can be merged without a copy."""
    # The strides decide, so that the check can be compiled.
    leading = [(n, step) for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return x.numel() == 0 or all(step == n * inner for (_, step), (n, inner) in pairwise(leading))


def at_positions(x: Tensor, block: slice) -> Tensor:
    """Copy the positions ``block``, in row-major order, of ``x [A, B, c]`` to ``[n, c]``; any strides."""
    # For tensors without such a view, such as one that is expanded along an axis.
    positions = torch.arange(block.start, block.stop, device=x.device)
    columns = x.shape[1]
    return x[positions.div(columns, rounding_mode="floor"), positions % columns]


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise a block of an exact dtype; return mean and reciprocal standard deviation, too."""
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def normalize_to(dtype: torch.dtype, x: Tensor, norm: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Normalise a block of any dtype by scale and shift in an exact dtype; round the result once, to ``dtype``."""
    # PyTorch's kernel for bfloat16 data and a norm in float32 computes in float32, and copies nothing.
    if x.dtype == dtype and (dtype == norm[0].dtype or (dtype == torch.bfloat16 and x.device.type == "cpu")):
        return torch.layer_norm(x, x.shape[-1:], *norm, eps)
    return normalize(x.to(norm[0].dtype), *norm, eps)[0].to(dtype)


def normalize_backward(
    grad: Tensor,
    x: Tensor,
    statistics: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """Return the gradient of :func:`normalize` for ``x``; add the parameters' gradients to totals that are not None."""
    wanted = [True, grad_weight is not None, grad_bias is not None]
    # In bfloat16, PyTorch's kernel would sum the parameters' gradients in this dtype, and take longer.
    exact = accumulation_dtype(x)
    grad_x, block_weight, block_bias = torch.ops.aten.native_layer_norm_backward(
        grad.to(exact), x.to(exact), x.shape[-1:], *statistics, weight, bias, wanted
    )
    if grad_weight is not None:
        grad_weight += block_weight
    if grad_bias is not None:
        grad_bias += block_bias
    return grad_x.to(x.dtype)
