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
from fastfold.kernels.common.layout import padded_width
from fastfold.kernels.common.tuning import chip_class

VARIABLE = "FASTFOLD_OUTER_CHUNKS"
"""Environment variable: ``1`` to compute in chunks always, ``0`` never; by default where it is predicted faster."""

CHUNK_BYTES = 1 << 25
"""Bytes of a chunk's products, which an L2 cache of 50 MB holds with their factors."""

GROUP = 4
"""Chunks whose elementwise work is done at once, in a buffer that need not stay in the cache."""


class Launches(NamedTuple):
    """Numbers of kernels: of PyTorch for a chunk and for a group of chunks, and of Triton for a group."""

    chunk: int
    group: int
    triton: int = 0

    def times(self, chunks: int, groups: int) -> tuple[float, float]:
        """Return the seconds that all of them take the device and the host."""
        by_torch = self.chunk * chunks + self.group * groups
        by_triton = self.triton * groups
        return (by_torch + by_triton) * _LAUNCH, by_torch * _HOST + by_triton * _HOST_TRITON


FORWARD_LAUNCHES = Launches(2, 0, 1)
ROW_LAUNCHES, COLUMN_LAUNCHES, JOIN_LAUNCHES = Launches(6, 5), Launches(3, 1), Launches(1, 1)
"""Launches of a backward pass: of rows with parameters, and for the other side of columns or in chunks of rows."""

HIDDEN_PAIRS = 384**2
"""Minimum number of pairs with which the device limits a network, so that it hides the host's time."""

GAIN = 0.8  #: Maximum share of the kernels' time for which chunks are chosen

_PRODUCTS, _CACHE, _MEMORY = 700e12, 5.5e12, 3.0e12
"""Operations of bfloat16 in a second, and bytes from the L2 cache and from memory."""

_LAUNCH, _HOST, _HOST_TRITON = 2e-6, 5e-6, 20e-6
"""Seconds that the device takes to end a kernel and begin another, and the host to launch one, or one of Triton."""

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


class ChunkSizes(NamedTuple):
    """Numbers of rows of a chunk, whose products have :data:`CHUNK_BYTES`, and of a group of chunks."""

    rows: int
    group: int

    def counts(self, rows: int) -> tuple[int, int]:
        """Return the numbers of chunks and groups of ``rows``."""
        return math.ceil(rows / self.rows), math.ceil(rows / self.group)


def chunk_sizes(rows: int, columns: int, channels: int, element_size: int) -> ChunkSizes:
    """Return the sizes of chunks of ``rows``, at least one row each."""
    step = min(rows, max(1, CHUNK_BYTES // (columns * channels**2 * element_size)))
    return ChunkSizes(step, min(rows, GROUP * step))


def parts_of_sum(rows: int, columns: int, channels: int) -> int:
    """Return the number of parts of a sum, a divisor of ``channels``, that fill the GPU with a product's tiles."""
    tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    return math.gcd(channels, 1 << (max(1, _PROCESSORS // tiles).bit_length() - 1))


def predict_forward(sizes: OuterProductSizes) -> PassTimes:
    """Return the times of a forward pass with a residual."""
    s, rows, columns, c, c_z = sizes
    pairs = rows * columns
    outer, projection, products = 2.0 * s * pairs * c**2, 2.0 * pairs * c**2 * c_z, 2 * pairs * c**2
    launches, host = FORWARD_LAUNCHES.times(*chunk_sizes(rows, columns, c, 2).counts(rows))
    device = max(outer / _PRODUCTS, products / _CACHE) + max(projection / _PRODUCTS, products / _CACHE)
    # The update is written and read, the residual read, and the result written.
    device += pairs * c_z * 4 * 2 / _MEMORY + launches
    return PassTimes(device, host, (outer + projection) / _KERNELS_FORWARD)


def predict_backward(sizes: OuterProductSizes) -> PassTimes:
    """Return the times of a backward pass with all gradients."""
    s, rows, columns, c, c_z = sizes
    pairs = rows * columns
    outer, projection, products = 2.0 * s * pairs * c**2, 2.0 * pairs * c**2 * c_z, 2 * pairs * c**2
    device, host = ROW_LAUNCHES.times(*chunk_sizes(rows, columns, c, 2).counts(rows))
    # Products are written and read; their gradients are written, and read for each side.
    device += 2 * max(projection / _PRODUCTS, products / _CACHE)
    device += 3 * max(outer / _PRODUCTS, products / _CACHE)
    # Partial sums of the weights' gradients, and of the side's, are written and read.
    device += 2 * 2 * (rows * c_z * c**2 + _partial_sums(sizes)) / _CACHE
    # Gradients of pairs are read, written with their factors, read, read again from the cache, and once for the bias.
    device += pairs * c_z * 2 * (4 / _MEMORY + 1 / _CACHE)
    more = min(_join_times(sizes), _column_times(sizes))
    return PassTimes(device + more[0], host + more[1], 3 * (outer + projection) / _KERNELS_BACKWARD)


def joins_sides(sizes: OuterProductSizes) -> bool:
    """Return True if chunks of rows serve both sides' gradients; otherwise chunks of columns follow."""
    return _join_times(sizes) <= _column_times(sizes)


def _join_times(sizes: OuterProductSizes) -> tuple[float, float]:
    """Return the times on device and host of adding the right side's gradient in chunks of rows."""
    s, rows, columns, c, _ = sizes
    chunks, groups = chunk_sizes(rows, columns, c, 2).counts(rows)
    device, host = JOIN_LAUNCHES.times(chunks, groups)
    # A chunk reads and writes a sum, which a group adds to a total in float32.
    return device + s * columns * c * (chunks * 2 * 2 / _CACHE + groups * (2 + 2 * 4) / _MEMORY), host


def _column_times(sizes: OuterProductSizes) -> tuple[float, float]:
    """Return the times on device and host of chunks of columns, without the products with the left side."""
    _, rows, columns, c, c_z = sizes
    pairs = rows * columns
    device, host = COLUMN_LAUNCHES.times(*chunk_sizes(columns, rows, c, 2).counts(columns))
    device += max(2.0 * pairs * c**2 * c_z / _PRODUCTS, 2 * pairs * c**2 / _CACHE)
    device += 2 * 2 * _partial_sums(sizes._replace(rows=columns, columns=rows)) / _CACHE
    # Gradients of pairs are read, written with their factors, and read.
    return device + pairs * c_z * 2 * 3 / _MEMORY, host


def _partial_sums(sizes: OuterProductSizes) -> int:
    """Return the elements of all partial sums of the gradient of the rows' side."""
    s, rows, columns, c, _ = sizes
    chunks, _ = chunk_sizes(rows, columns, c, 2).counts(rows)
    parts = parts_of_sum(math.ceil(rows / chunks) * c, s, c)
    return rows * c * s * (parts if parts > 1 else 0)


def forward_buffers(sizes: OuterProductSizes, element_size: int) -> int:
    """Return the bytes of buffers of a forward pass in chunks, without its masked sides."""
    _, rows, columns, c, c_z = sizes
    width = padded_width(columns)
    chunks = chunk_sizes(rows, width, c, element_size)
    return element_size * width * (chunks.rows * c**2 + chunks.group * c_z) + 4 * rows * columns


def backward_buffers(sizes: OuterProductSizes, element_size: int) -> int:
    """Return the bytes of buffers of a backward pass in chunks, without its masked sides."""
    s, rows, columns, c, c_z = sizes
    width = padded_width(columns)
    row_chunks = chunk_sizes(rows, width, c, element_size)
    parts = parts_of_sum(row_chunks.rows * c, s, c)
    # The gradient of a side, two orders of the weights, sums of a group, and partial sums of a chunk.
    sums = element_size * (s * rows * c + 2 * c_z * c**2) + 4 * GROUP * c_z * c**2
    sums += element_size * row_chunks.rows * c * max(c_z * c, parts * s if parts > 1 else 0)
    own = forward_buffers(sizes, element_size)
    if joins_sides(sizes):
        return sums + own + (4 + element_size) * s * width * c
    # Columns have the same buffers after the rows.
    return sums + max(own, forward_buffers(sizes._replace(rows=columns, columns=rows), element_size))


def choose_forward(right: Tensor, mask_shape: torch.Size, pair_channels: int) -> bool:
    """Return True to compute the forward pass in chunks, for a right side with the mask ``[*, S, J]``.

    ``right [*, c]`` is a part of the side. The left side is expected to have as many columns.

    Raises:
        ConfigError: The environment variable has another value than 0 or 1.
    """
    requested = _requested(right, chip_class(right.device))
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
    requested = _requested(left, chip_class(left.device))
    if requested is not None:
        return requested
    sequences, rows, c = left.shape[-3:]
    sizes = OuterProductSizes(sequences, rows, columns, c, pair_channels)
    return predict_backward(sizes).are_best_in_chunks(rows * columns)


def buffers_of(x: Tensor, sizes: OuterProductSizes, backend: str, *, backward: bool) -> int:
    """Return the bytes of a pass's buffers if it is computed in chunks, else 0.

    ``x`` is a side. Without data it belongs to a plan, whose GPU may be one that computes in chunks.
    """
    if backend != "triton" and not x.is_meta:
        return 0
    is_chosen = _requested(x, "sm_90" if x.is_meta else chip_class(x.device))
    if is_chosen is None:
        times = predict_backward(sizes) if backward else predict_forward(sizes)
        is_chosen = times.are_best_in_chunks(sizes.rows * sizes.columns)
    buffers = backward_buffers if backward else forward_buffers
    return buffers(sizes, x.element_size()) if is_chosen else 0


def _requested(x: Tensor, chip: str) -> bool | None:
    """Return the choice for data like ``x`` on a chip if it does not depend on sizes, else None."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}: expected 0 or 1, found {value!r}")
    if value == "0" or x.dtype == torch.float16:  # sums over sequences exceed its range
        return False
    if value == "1":
        return True
    return None if x.dtype == torch.bfloat16 and chip == "sm_90" else False
