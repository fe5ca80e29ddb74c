"""The middle of a triangle multiplication: which factors exist when, and where their product waits.

All of a pair tensor takes part in each element of the product, so old and new exist together. The product is made for
a group of channels at a time, because only so many of its factors then exist; with :class:`HostBuffers` its finished
parts leave the device, and come back in blocks of rows when all are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements
from fastfold.kernels.common.scratch import Scratch
from fastfold.memory.offload import HostBuffers, StreamedRows


@dataclass(frozen=True)
class ContractionPlan:
    """How the contraction is carried out.

    Attributes:
        channels: Channels whose factors exist at a time; None leaves it to the backend.
        host: Where the product waits; None for the device.
    """

    channels: int | None = None
    host: HostBuffers | None = None


def contraction_bytes(n: int, c: int, element_size: int, *, channels: int, streamed: bool) -> int:
    """Memory on the device that :func:`multiply` takes beside its arguments, without what its backend takes.

    Args:
        n: Length N of the target.
        c: Hidden channels.
        element_size: Bytes per element.
        channels: Channels whose factors exist at a time.
        streamed: Whether the product waits on the host.
    """
    factors = 2 * channels * n * n
    if not streamed:
        return element_size * (factors + c * n * n)
    rows = block_rows(n, c, channels)
    return element_size * (max(factors, 2 * c * rows * n) + 2 * channels * rows * n)


def block_rows(n: int, c: int, channels: int) -> int:
    """Rows of the blocks that come back: two of them fit where the factors were."""
    return max(1, channels * n // c)


class Halves(Protocol):
    """What a backend does before and after the contraction, for one batch element."""

    def project(self, sides: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """Fill ``sides [2 count, N, N]``: channels from ``first`` of the left factor, then of the right one."""

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """Fill rows of the result ``[rows, N, c_z]`` from those of the product ``[c, rows, N]``."""


def multiply(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    outgoing: bool,
    c: int,
    channels: int,
    halves: Halves,
    residual: Tensor | None,
    dropout: Tensor | None,
    scratch: Scratch,
    host: HostBuffers | None,
) -> None:
    """Fill ``out [*, N, N, c_z]``, which may be ``z`` or ``residual``.

    Args:
        out: Where the result goes.
        z: Pair tensor.
        mask: ``[*, N, N]``.
        outgoing: Which of the two contractions.
        c: Hidden channels.
        channels: Channels whose factors exist at a time.
        halves: The backend.
        residual: Of the shape of ``z``, or None.
        dropout: Of the shape of ``z``, or None.
        scratch: Buffers, of the dtype and device of ``z``.
        host: Where the product waits; None for the device.
    """
    n = z.shape[-2]
    for i in batch_elements(z):
        finished = _product(z[i], mask[i], outgoing, c, channels, halves, scratch, host)
        for rows, product in finished:
            b_residual = None if residual is None else residual[i][rows]
            b_dropout = None if dropout is None else dropout[i][rows]
            halves.write(out[i][rows], product.view(c, -1, n), z[i][rows], b_residual, b_dropout)


def _product(
    z: Tensor,
    mask: Tensor,
    outgoing: bool,
    c: int,
    channels: int,
    halves: Halves,
    scratch: Scratch,
    host: HostBuffers | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of the product with their content ``[c, rows, N]``, when all of it is there."""
    n = z.shape[-2]
    size = n if host is None else block_rows(n, c, channels)
    blocks = [slice(start, min(n, start + size)) for start in range(0, n, size)]
    product = streamed = None
    if host is None:
        product = scratch("product", c, n, n)
    else:
        staging = scratch("staging", 2, min(c, channels) * size * n)
        streamed = StreamedRows(host, c, blocks, n, (staging[0], staging[1]), z)
    for first in range(0, c, channels):
        count = min(channels, c - first)
        sides = scratch("factors", 2 * count, n, n)
        halves.project(sides, z, mask, first, count)
        left, right = sides[:count], sides[count:]
        for index, rows in enumerate(blocks):
            if streamed is None:
                assert product is not None
                contract(left, right, rows, outgoing, product[first : first + count])
            else:
                part = streamed.part(count, index)
                contract(left, right, rows, outgoing, part)
                streamed.send(part, first, index)
    if streamed is None:
        assert product is not None
        yield blocks[0], product
    else:
        # The factors are done with: what comes back takes their place.
        back = scratch("factors", 2, c * size * n)
        yield from streamed.read((back[0], back[1]))


def contract(left: Tensor, right: Tensor, rows: slice, outgoing: bool, out: Tensor) -> None:
    """Fill rows of the sums over all triangles, ``out [g, rows, N]``, from factors ``[g, N, N]``."""
    if outgoing:
        torch.bmm(left[:, rows], right.mT, out=out)
    else:
        torch.bmm(right[:, :, rows].mT, left, out=out)


def contract_backward(grad: Tensor, left: Tensor, right: Tensor, outgoing: bool, buffer: Tensor) -> None:
    """Put the gradients of factors ``[g, N, N]`` in their place, from that of their product.

    Args:
        grad: ``[g, N, N]``.
        left: Overwritten by its gradient.
        right: Likewise.
        outgoing: Which of the two contractions.
        buffer: Working memory ``[g, N, N]``.
    """
    if outgoing:
        torch.bmm(grad, right, out=buffer)
        torch.bmm(grad.mT, left, out=right)
    else:
        torch.bmm(right, grad, out=buffer)
        torch.bmm(left, grad.mT, out=right)
    left.copy_(buffer)
