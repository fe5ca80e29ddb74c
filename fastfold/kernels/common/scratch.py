"""What the operators' PyTorch paths share: blocks that fit into the cache, in buffers that are used again.

New memory costs a page fault for every 4 KiB, and the C library hands freed blocks of this size back to the
system: measured on a virtual machine, a fresh megabyte took 4 ms to fill and a reused one 0.05 ms. So every
operator works on blocks, in buffers of its own that live as long as the call, and writes only its result to new
memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Elements of the largest buffer of a block. 4 MiB of float32 stay in the second-level caches of two cores and
# still make matrices large enough for the full rate of the matrix product.
BLOCK_ELEMENTS = 2**20


class Scratch:
    """Buffers of an operator call by name; the next use of a name overwrites the last.

    An operator makes its own and drops it when it returns. One that is passed to successive calls (of a network
    that folds, say) keeps the buffers for all of them.

    Args:
        device: Where the buffers live.
        dtype: Their dtype.
    """

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._lanes: dict[int, Scratch] = {}

    def of(self, x: Tensor, dtype: torch.dtype | None = None) -> Scratch:
        """The same buffers for the device of ``x``, and its dtype or another."""
        scratch = Scratch(x.device, x.dtype if dtype is None else dtype)
        scratch._buffers, scratch._lanes = self._buffers, self._lanes
        return scratch

    def lane(self, index: int) -> Scratch:
        """Buffers of their own for the thread ``index`` of those that share an operator's work; of the first these."""
        if index == 0:
            return self
        return self._lanes.setdefault(index, Scratch()).of(
            torch.empty((), device=self.device, dtype=self.dtype)
        )

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Contiguous tensor of any content in the buffer ``name``."""
        size = math.prod(shape)
        key = (name, self.dtype, self.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(shape, device=self.device, dtype=self.dtype)
        # Most blocks are alike: no view is made where none is needed.
        return buffer if buffer.shape == shape else buffer.view(-1)[:size].view(shape)

    def copy(self, name: str, x: Tensor) -> Tensor:
        """Contiguous copy of ``x`` in the buffer ``name``."""
        return self(name, *x.shape).copy_(x)

    def transpose(self, name: str, x: Tensor) -> Tensor:
        """Contiguous ``x.t()`` of a matrix ``x`` whose rows may lie far apart, in the buffer ``name``.

        In two steps: to read a column at once would take a line of the cache from every row, most often all for the
        same place in it. PyTorch transposes matrices without gaps tile by tile.
        """
        return self.copy(name, self.copy(f"{name} before", x).t())

    def drop(self, name: str) -> None:
        """Free the buffer ``name``."""
        self._buffers.pop((name, self.dtype, self.device), None)


def accumulation_dtype(x: Tensor | torch.dtype) -> torch.dtype:
    """Dtype of statistics and accumulators for data like ``x``: float32, or float64 for float64."""
    dtype = x if isinstance(x, torch.dtype) else x.dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def share_of(summands: int, dtype: torch.dtype) -> float:
    """Factor of sums of products, with which float16 can hold them wherever it can hold their mean.

    A power of two, so that nothing is lost; 1 for dtypes that large numbers fit into.
    """
    return 1.0 if dtype != torch.float16 else 0.5 ** max(0, summands - 1).bit_length()


def without_autocast(function: Callable[..., Any]) -> Any:
    """Run a function in the dtypes of its tensors, whatever autocast says around it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        if device == "meta":  # shapes alone, for which there is no autocast
            return function(*args, **options)
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return wrapped


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise a RuntimeError if autograd would have to record an operator that writes into a given ``out``."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError(
            "out= records no gradients: call the operator without it, or under torch.no_grad()"
        )


def finish(out: Tensor, update: Tensor, residual: Tensor | None, dropout: Tensor | None) -> None:
    """``out = residual + dropout * update`` for one block; overwrites ``update``, and ``out`` may be ``residual``."""
    if dropout is not None:
        update.mul_(dropout)
    if residual is None:
        out.copy_(update)
    else:
        torch.add(residual, update, out=out)


def block_positions(channels: int) -> int:
    """Positions per block, for a widest buffer of ``channels``.

    No more than 1,024: the gradients of a normalisation's parameters are summed one position after the other
    within a block, and rounding errors grow with the length of that sum.
    """
    return max(1, min(1024, BLOCK_ELEMENTS // channels))


def position_blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk over tensors with the same leading axes in blocks of at most ``size`` positions.

    Args:
        size: Positions per block.
        tensors: ``[*, c_t]`` each, with equal leading axes and any strides.

    Yields:
        Views ``[n, c_t]`` of the tensors, in row-major order of the positions. Nothing is copied: where the
        leading axes cannot be merged without a copy, the outermost is walked by index.
    """
    if all(map(_merges, tensors)):
        flat = [t if t.dim() == 2 else t.view(math.prod(t.shape[:-1]), t.shape[-1]) for t in tensors]
        if len(flat[0]) <= size:
            yield tuple(flat)
        else:
            yield from zip(*(t.split(size) for t in flat), strict=True)
    else:
        for parts in zip(*(t.unbind(0) for t in tensors), strict=True):
            yield from position_blocks(size, *parts)


def _merges(x: Tensor) -> bool:
    """Whether the leading axes of ``x`` can be one without a copy; asked of the strides, so that it can be compiled."""
    leading = [(n, step) for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return x.numel() == 0 or all(step == n * inner for (_, step), (n, inner) in pairwise(leading))


def at_positions(x: Tensor, block: slice) -> Tensor:
    """Copy ``[n, c]`` of the positions ``block``, in row-major order, of ``x [A, B, c]`` with any strides.

    For tensors that are read in blocks but have no such view, as one that is expanded along an axis.
    """
    positions = torch.arange(block.start, block.stop, device=x.device)
    columns = x.shape[1]
    return x[positions.div(columns, rounding_mode="floor"), positions % columns]


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalisation of one block; ``x`` and the parameters in an exact dtype.

    Returns:
        The result, and the mean and reciprocal standard deviation that :func:`normalise_backward` needs.
    """
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def normalise_backward(
    grad: Tensor,
    x: Tensor,
    statistics: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """Gradient of :func:`normalise` for ``x``; adds those of the parameters to the totals that are not None."""
    wanted = [True, grad_weight is not None, grad_bias is not None]
    grad_x, block_weight, block_bias = torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], *statistics, weight, bias, wanted
    )
    if grad_weight is not None:
        grad_weight += block_weight
    if grad_bias is not None:
        grad_bias += block_bias
    return grad_x
