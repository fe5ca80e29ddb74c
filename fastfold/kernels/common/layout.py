"""Memory layout of operands that kernels read, and constants that operators share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

MAX_ROW_LENGTH = 4096  #: Maximum row length of the Triton kernels whose programs hold whole rows, in elements

MAX_CHANNELS = 256
"""Maximum row width of the Triton kernels that multiply whole rows by a matrix, in channels."""

GPU_POSITIONS = 1 << 17
"""Positions of the largest block of attention on a GPU, which fills it and takes little of its memory."""

MASKED_LOGIT = -1e9
"""AlphaFold's substitute for minus infinity: if all keys of a row are masked, they have equal weights, and attention
returns the mean of their values."""

MAX_HEAD_CHANNELS = 128  #: Maximum channels of a head for Triton's attention, whose programs hold whole heads

SMALL_PRODUCT = 2**24
"""Elements of a product of triangle multiplication below which the gradients of each factor take one launch."""

MAX_HEADS = 16
"""Maximum number of heads of a pair bias: 32 heads with 128 channels of float32 exceed a program's registers."""

_ALIGNMENT = 8
"""Elements; if rows of 16-bit matrices begin at multiples of this number, they are read by 16 bytes at a time."""


def padded_width(n: int) -> int:
    """Round rows or columns of a matrix up to a width that cuBLAS multiplies fast."""
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def batched(x: Tensor, axes: int = 4) -> Tensor:
    """Merge the leading axes of ``x`` before its last ``axes``; a view if strides allow it."""
    batch = x.shape[: x.dim() - axes]
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def batch_elements(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the indices of all elements before the last three axes of ``x``; none if ``x`` is empty."""
    return itertools.product(*map(range, x.shape[:-3] if x.numel() else (0,)))


def part(x: MaybeTensor, index: tuple[int | slice, ...]) -> MaybeTensor:
    """Return ``x[index]``, or ``x`` itself without an index, because every view costs host time; None stays None."""
    return x if x is None or not index else x[index]


def innermost(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if its last axis has gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return ``x`` without gaps, or None."""
    return None if x is None else x.contiguous()


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """Return ``count`` strides of the axes before the last; zeros for None and for missing leading axes."""
    own = () if x is None else x.stride()[:-1]
    return (0,) * (count - len(own)) + own


def padded(size: int) -> int:
    """Round the width of a row up to a power of two, at least 16 for products."""
    return max(16, 1 << (size - 1).bit_length())


MAX_AXES = 3  #: Leading axes that a kernel can walk without a copy; neighbours that merge count as one


@dataclass(frozen=True)
class Rows:
    """Rows of several tensors with equal leading axes and adjacent channels."""

    tensors: list[Tensor]  #: The tensors, copied if their rows could not be walked in place
    count: int  #: Number of rows
    axes: int  #: Number of axes that the rows have in memory, 1 to 3
    sizes: tuple[int, int]  #: Sizes of the last two axes, which split up a row's number
    #: Strides ``(outer, middle, inner)`` of the three axes for each tensor
    strides: list[tuple[int, int, int]]


def rows_of(*tensors: Tensor, channels_apart: tuple[int, ...] = ()) -> Rows:
    """Arrange tensors ``[*, c_t]`` with equal leading axes and any strides as rows.

    A tensor is copied if more than three axes remain after merging, or if its channels are not adjacent and its
    position is not in ``channels_apart``.
    """
    tensors = tuple(
        t if i in channels_apart or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()
        for i, t in enumerate(tensors)
    )
    sizes, strides = _merge(tensors)
    for kept in (channels_apart, ()):
        if len(sizes) > MAX_AXES:
            tensors = tuple(t if i in kept else t.contiguous() for i, t in enumerate(tensors))
            sizes, strides = _merge(tensors)
    padding = MAX_AXES - len(sizes)
    full = [1] * padding + sizes
    unused = [(0,) * len(tensors)] * padding
    outer, middle, inner = unused + strides
    count = full[0] * full[1] * full[2]
    return Rows(
        list(tensors),
        count,
        max(1, len(sizes)),
        (full[1], full[2]),
        list(zip(outer, middle, inner, strict=True)),
    )


def _merge(tensors: tuple[Tensor, ...]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Merge neighbouring leading axes that all tensors allow; return sizes, and strides in every tensor."""
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    for axis, size in enumerate(tensors[0].shape[:-1]):
        step = tuple(t.stride(axis) for t in tensors)
        if size == 1:
            continue
        if sizes and all(outer == size * inner for outer, inner in zip(strides[-1], step, strict=True)):
            sizes[-1], strides[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            strides.append(step)
    return sizes, strides
