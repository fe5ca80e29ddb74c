"""Tensors as rows of channels: where row i lies in memory, whatever the strides of the leading axes."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def row_offset(o_row, size_1, size_2, stride_0, stride_1, stride_2, AXES: tl.constexpr):
    """Offsets of the first channels of rows, in int64: a pair tensor passes 2^31 elements at 4,096 residues."""
    o_row = o_row.to(tl.int64)
    if AXES == 1:
        return o_row * stride_2
    o_outer = o_row // size_2
    o_inner = o_row % size_2
    if AXES == 2:
        return o_outer * stride_1 + o_inner * stride_2
    return (o_outer // size_1) * stride_0 + (o_outer % size_1) * stride_1 + o_inner * stride_2
