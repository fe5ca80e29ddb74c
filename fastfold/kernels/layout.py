"""How operands lie in memory when a kernel reads them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from torch import Tensor

LONGEST_ROW = 4096
"""Elements of the longest row that the Triton kernels take whose programs hold whole rows."""

MOST_CHANNELS = 256
"""Channels of the widest rows that the Triton kernels multiply by a matrix, which they hold whole for that."""

ROW_WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lengths to which these rows are padded."""


def batched(x: Tensor, axes: int = 4) -> Tensor:
    """``x`` with its leading axes merged into one before the last ``axes``: a view wherever strides allow it."""
    batch = x.shape[: x.dim() - axes]
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def batch_elements(x: Tensor, axes: int = 3) -> Iterator[tuple[int, ...]]:
    """Indices of all that ``x`` holds in front of its last ``axes``; none if there is nothing in it."""
    return itertools.product(*map(range, x.shape[:-axes] if x.numel() else (0,)))


def innermost(x: Tensor) -> Tensor:
    """``x``, or a copy if its last axis has gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of ``x``; zeros for what is missing."""
    return (0,) * count if x is None else x.stride()[:count]


def padded(size: int) -> int:
    """The power of two, from 16 on, that a row is padded to in a kernel; matrix products need 16."""
    return max(16, 1 << (size - 1).bit_length())
