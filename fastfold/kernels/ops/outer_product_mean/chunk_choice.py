"""Choice between Triton's kernels of the outer product mean and :mod:`.chunks`, by predicted times.

Rates are those of an H100. The kernels' times are measured, and those of chunks predicted: no GPU has run them.
``benchmarks/results/kernel_choices.md`` has the prediction as a table.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.tuning import chip_class

VARIABLE = "FASTFOLD_OUTER_CHUNKS"
"""Environment variable: ``1`` to compute in chunks always, ``0`` never; by default where it is predicted faster."""

CHUNK_BYTES = 1 << 25
"""Bytes of a chunk's products, which an L2 cache of 50 MB holds with their factors."""

FORWARD_LAUNCHES, ROW_LAUNCHES, COLUMN_LAUNCHES = 4, 11, 4
"""Kernels that PyTorch launches for a chunk: forward, and backward of the rows (with parameters) and columns."""

HIDDEN_PAIRS = 384**2
"""Minimum number of pairs with which the device limits a network, so that it hides the host's time."""

GAIN = 0.8  #: Maximum share of the kernels' time for which chunks are chosen

_PRODUCTS, _CACHE, _MEMORY = 700e12, 5.5e12, 3.0e12
"""Operations of bfloat16 in a second, and bytes from the L2 cache and from memory."""

_LAUNCH, _HOST = 2e-6, 5e-6
"""Seconds that the device takes to end a kernel and begin another, and the host to launch one."""

_KERNELS_FORWARD, _KERNELS_BACKWARD = 288e12, 229e12
"""Operations in a second of Triton's kernels: 549.8 GFLOP in 1.91 ms, and 1,649 GFLOP in 7.21 ms."""

_PROCESSORS, _TILE = 132, 128
"""Multiprocessors, and rows and columns of a product for one of them."""


class OuterProductSizes(NamedTuple):
    """Sizes of an outer product mean of one alignment in bfloat16."""

    sequences: int
    rows: int
    columns: int
    channels: int
    pair_channels: int


class PassTimes(NamedTuple):
    """Times of an outer product mean: in chunks on the device and on the host, and by Triton's kernels."""

    device: float
    host: float
    kernels: float

    def are_best_in_chunks(self, pairs: int) -> bool:
        """Return True if chunks are faster, also for a network with so few pairs that it waits for the host."""
        is_hidden = pairs >= HIDDEN_PAIRS or self.host <= self.kernels - self.device
        return is_hidden and max(self.device, self.host) <= GAIN * self.kernels


def chunk_rows(columns: int, channels: int, element_size: int) -> int:
    """Return the number of rows whose products have :data:`CHUNK_BYTES`, at least one."""
    return max(1, CHUNK_BYTES // (columns * channels**2 * element_size))


def parts_of_sum(rows: int, columns: int, channels: int) -> int:
    """Return the number of parts of a sum, a divisor of ``channels``, that fill the GPU with a product's tiles."""
    tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    return math.gcd(channels, 1 << (max(1, _PROCESSORS // tiles).bit_length() - 1))


def predict_forward(sizes: OuterProductSizes) -> PassTimes:
    """Return the times of a forward pass with a residual."""
    s, rows, columns, c, c_z = sizes
    pairs = rows * columns
    outer, projection, products = 2.0 * s * pairs * c**2, 2.0 * pairs * c**2 * c_z, 2 * pairs * c**2
    launches = FORWARD_LAUNCHES * math.ceil(rows / chunk_rows(columns, c, 2))
    device = max(outer / _PRODUCTS, products / _CACHE) + max(projection / _PRODUCTS, products / _CACHE)
    # The update is written, read and written with the bias, and read; then the residual is read and the result written.
    device += pairs * c_z * (4 * 2 / _CACHE + 2 * 2 / _MEMORY) + launches * _LAUNCH
    return PassTimes(device, launches * _HOST, (outer + projection) / _KERNELS_FORWARD)


def predict_backward(sizes: OuterProductSizes) -> PassTimes:
    """Return the times of a backward pass with all gradients."""
    s, rows, columns, c, c_z = sizes
    pairs = rows * columns
    outer, projection, products = 2.0 * s * pairs * c**2, 2.0 * pairs * c**2 * c_z, 2 * pairs * c**2
    chunks = math.ceil(rows / chunk_rows(columns, c, 2)), math.ceil(columns / chunk_rows(rows, c, 2))
    launches = ROW_LAUNCHES * chunks[0] + COLUMN_LAUNCHES * chunks[1]
    # Products, and gradients of them for both sides, are written once and read once each.
    device = 3 * (max(outer / _PRODUCTS, products / _CACHE) + max(projection / _PRODUCTS, products / _CACHE))
    # Partial sums of the weights' gradients, and of the sides', are written and read.
    sides = 0
    for own, count in zip((rows, columns), chunks, strict=True):
        parts = parts_of_sum(math.ceil(own / count) * c, s, c)
        sides += own * c * s * (parts if parts > 1 else 0)
    device += 2 * 2 * (rows * c_z * c**2 + sides) / _CACHE
    # Gradients of pairs are read three times, and each time written and read once more with their factors.
    device += 3 * pairs * c_z * (2 / _MEMORY + 2 * 2 / _CACHE) + launches * _LAUNCH
    return PassTimes(device, launches * _HOST, 3 * (outer + projection) / _KERNELS_BACKWARD)


def choose_forward(right: Tensor, mask_shape: torch.Size, pair_channels: int) -> bool:
    """Return True to compute the forward pass in chunks, for a right side with the mask ``[*, S, J]``.

    ``right [*, c]`` is a part of the side. The left side is expected to have as many columns.

    Raises:
        ConfigError: The environment variable has another value than 0 or 1.
    """
    requested = _requested(right)
    if requested is not None:
        return requested
    sequences, columns = mask_shape[-2:]
    sizes = OuterProductSizes(sequences, columns, columns, right.shape[-1], pair_channels)
    return predict_forward(sizes).are_best_in_chunks(columns**2)


def choose_backward(left: Tensor, columns: int, pair_channels: int) -> bool:
    """Return True to compute the backward pass in chunks, for a side ``left [*, S, I, c]``.

    Raises:
        ConfigError: The environment variable has another value than 0 or 1.
    """
    requested = _requested(left)
    if requested is not None:
        return requested
    sequences, rows, c = left.shape[-3:]
    sizes = OuterProductSizes(sequences, rows, columns, c, pair_channels)
    return predict_backward(sizes).are_best_in_chunks(rows * columns)


def _requested(x: Tensor) -> bool | None:
    """Return the choice for data like ``x`` if it does not depend on sizes, else None."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}: expected 0 or 1, found {value!r}")
    if value == "0" or x.dtype == torch.float16:  # sums over sequences exceed its range
        return False
    if value == "1":
        return True
    return None if x.dtype == torch.bfloat16 and chip_class(x.device) == "sm_90" else False
