"""How operands lie in memory when a kernel reads them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

MAX_ROW_LENGTH = 4096
"""Elements of the longest row that the Triton kernels take whose programs hold whole rows."""

MAX_CHANNELS = 256
"""Channels of the widest rows that the Triton kernels multiply by a matrix, which they hold whole for that."""

ROW_WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lengths to which these rows are padded."""


_ALIGNMENT = 8
"""Elements; rows of matrices of 16 bits that all begin at multiples of so many are read by 16 bytes at a time."""


def padded_width(n: int) -> int:
    """Rows and columns of matrices on a GPU, where cuBLAS is slow for those whose rows begin anywhere."""
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def batched(x: Tensor, axes: int = 4) -> Tensor:
    """``x`` with its leading axes merged into one before the last ``axes``: a view wherever strides allow it."""
    batch = x.shape[: x.dim() - axes]
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def batch_elements(x: Tensor, axes: int = 3) -> Iterator[tuple[int, ...]]:
    """Indices of all that ``x`` holds in front of its last ``axes``; none if there is nothing in it."""
    return itertools.product(*map(range, x.shape[:-axes] if x.numel() else (0,)))


def part(x: MaybeTensor, index: tuple[int | slice, ...]) -> MaybeTensor:
    """``x[index]``, but ``x`` itself if there is no index: every view costs the host time. None stays None."""
    return x if x is None or not index else x[index]


def innermost(x: Tensor) -> Tensor:
    """``x``, or a copy if its last axis has gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    """``x`` without gaps, or None."""
    return None if x is None else x.contiguous()


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of ``x``; zeros for what is missing."""
    return (0,) * count if x is None else x.stride()[:count]


def padded(size: int) -> int:
    """The power of two, from 16 on, that a row is padded to in a kernel; matrix products need 16."""
    return max(16, 1 << (size - 1).bit_length())


MAX_AXES = 3
"""Leading axes that a kernel walks over without a copy; neighbours that lie evenly in memory count as one."""


@dataclass(frozen=True)
class Rows:
    """Rows of several tensors with equal leading axes, whose channels lie next to each other.

    Attributes:
        tensors: The tensors, copied where they could not be walked over as they were.
        count: Number of rows.
        axes: Number of axes that the rows have in memory, 1 to 3.
        sizes: Sizes of the last two axes, which split up a row's number.
        strides: Strides ``(outer, middle, inner)`` of the three axes for each tensor.
    """

    tensors: list[Tensor]
    count: int
    axes: int
    sizes: tuple[int, int]
    strides: list[tuple[int, int, int]]


def rows_of(*tensors: Tensor, channels_apart: tuple[int, ...] = ()) -> Rows:
    """Lay tensors ``[*, c_t]`` with equal leading axes out as rows.

    Args:
        tensors: Any strides. Where channels are not neighbours, or more than three axes do not merge, a tensor is
            copied.
        channels_apart: Positions of tensors whose channels may have any stride.
    """
    tensors = tuple(
        t if i in channels_apart or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()
        for i, t in enumerate(tensors)
    )
    sizes, strides = _merge(tensors)
    if len(sizes) > MAX_AXES:
        tensors = tuple(t if i in channels_apart else t.contiguous() for i, t in enumerate(tensors))
        sizes, strides = _merge(tensors)
    if len(sizes) > MAX_AXES:
        tensors = tuple(t.contiguous() for t in tensors)
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
    """Sizes of the leading axes, and their strides in every tensor, with neighbours merged where all allow it."""
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
