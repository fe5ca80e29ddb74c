"""Contraction of a triangle multiplication, in groups of channels, with the product on the device or the host.

All of a pair tensor takes part in each element of the product, so old and new exist together. The product is computed
for a group of channels at a time, so that only the group's factors exist. With :class:`HostBuffers` finished
parts of the product, except for some of its rows, go to the host. They return in blocks of rows when all are complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements, part
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu.linear import batched_product
from fastfold.memory.offload import HostBuffers, StreamedRows, kept_rows


class TriangleBackend(Protocol):
    """Operations before and after the contraction; :class:`~.eager.TriangleForward` describes them."""

    dtype: torch.dtype
    share: float

    def width(self, n: int) -> int:
        """Return the rows and columns of factors for a pair of N."""

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """Fill ``projections [2 count, W, W]``."""

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """Fill rows of the result ``[rows, N, c_z]`` from those of the product ``[c, rows, W]``."""


SMALL_PRODUCT = 2**24
"""Size of a product, in elements, below which the gradients of each factor take one launch."""


@dataclass(frozen=True)
class ContractionPlan:
    """Plan of a contraction."""

    #: Channels whose factors exist at a time; None leaves the number to the backend
    channels: int | None = None
    host: HostBuffers | None = None  #: Host memory for the product; None keeps it on the device
    kept: float = 0.0  #: With ``host``: share of the product's rows that stay on the device, from 0 to 1


def contraction_bytes(
    n: int,
    c: int,
    element_size: int,
    *,
    channels: int,
    streamed: bool,
    kept: float = 0.0,
    width: int | None = None,
) -> int:
    """Return the device memory of :func:`multiply`, in bytes, without its arguments and its backend's memory.

    The target has ``n`` residues and ``c`` hidden channels; ``channels`` of them exist at a time. A ``streamed``
    product is on the host, but for the share ``kept`` of its rows. ``width`` is that of
    :meth:`~.eager.TriangleForward.width`, by default ``n``.
    """
    w = width or n
    factors = 2 * channels * w * w
    first = kept_rows(n, kept) if streamed else n
    if first == n:
        return element_size * (factors + c * w * w)
    rows = min(n - first, block_rows(n, c, channels))
    return element_size * (c * first * w + max(factors, 2 * c * rows * w) + 2 * channels * rows * w)


def block_rows(n: int, c: int, channels: int) -> int:
    """Return the rows of a block from the host; two blocks fit into the factors' memory."""
    return max(1, channels * n // c)


def narrow_group(channels: int, c: int) -> int:
    """Return the channels that fit the memory of float32 if factors and product have half its bytes."""
    return min(c, 2 * channels + c // 2)


def multiply(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    backend: TriangleBackend,
    plan: ContractionPlan,
    *,
    residual: Tensor | None,
    dropout: Tensor | None,
    outgoing: bool,
    c: int,
    scratch: Scratch,
) -> None:
    """Fill ``out [*, N, N, c_z]``, which may be ``z`` or ``residual``.

    The mask is ``[*, N, N]``; residual and dropout have the shape of ``z`` or are None. ``c`` is the number of hidden
    channels. The buffers are on the device of ``z``.
    """
    if z.dim() > 3:
        for i in batch_elements(z):
            multiply(
                *(out[i], z[i], mask[i], backend, plan),
                residual=part(residual, i),
                dropout=part(dropout, i),
                outgoing=outgoing,
                c=c,
                scratch=scratch,
            )
        return
    if not z.numel():
        return
    n, scratch = z.shape[-2], scratch.of(z, backend.dtype)
    for rows, product in _product(z, mask, backend, plan, outgoing=outgoing, c=c, scratch=scratch):
        if rows == slice(0, n):
            backend.write(out, product, z, residual, dropout)
            continue
        product = product if product.dim() == 3 else product.view(c, -1, backend.width(n))
        backend.write(out[rows], product, z[rows], part(residual, (rows,)), part(dropout, (rows,)))


def _product(
    z: Tensor,
    mask: Tensor,
    backend: TriangleBackend,
    plan: ContractionPlan,
    *,
    outgoing: bool,
    c: int,
    scratch: Scratch,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of the product with their content ``[c, rows, W]``, after all of it is computed."""
    n, host, channels = z.shape[-2], plan.host, plan.channels or c
    w = backend.width(n)
    first_away, size, blocks = n, n, []
    if host is not None:
        first_away, size = kept_rows(n, plan.kept), block_rows(n, c, channels)
        blocks = [slice(start, min(n, start + size)) for start in range(first_away, n, size)]
    here = slice(0, first_away if blocks else w)
    product = scratch("product", c, here.stop, w) if first_away else None
    streamed = divided = None
    if blocks:
        assert host is not None
        staging = scratch("staging", 2, min(c, channels) * min(size, n - first_away) * w)
        streamed = StreamedRows(host, c, blocks, w, (staging[0], staging[1]), staging)
    for first in range(0, c, channels):
        count = min(channels, c - first)
        factors = scratch("factors", 2 * count, w, w)
        backend.project(factors, z, mask, first, count)
        if factors is not divided:
            left, right = factors.chunk(2)
            divided = factors
        if product is not None:
            group = product if count == c else product[first : first + count]
            contract(left, right, here, outgoing, group, backend.share)
        for index, rows in enumerate(blocks):
            assert streamed is not None
            waiting = streamed.part(count, index)
            contract(left, right, rows, outgoing, waiting, backend.share)
            streamed.send(waiting, first, index)
    if product is not None:
        yield slice(0, first_away), product
    if streamed is not None:
        # Factors are no longer needed: blocks from the host take their memory.
        back = scratch("factors", 2, c * min(size, n - first_away) * w)
        yield from streamed.read((back[0], back[1]))


def contract(
    left: Tensor, right: Tensor, rows: slice, outgoing: bool, out: Tensor, share: float = 1.0
) -> None:
    """Fill rows ``out [g, rows, N]`` of the sums over all triangles times a share, from factors ``[g, N, N]``."""
    whole = rows == slice(0, left.shape[-1])
    if outgoing:
        a, b = left if whole else left[:, rows], right.mT
    else:
        a, b = (right if whole else right[:, :, rows]).mT, left
    if share == 1.0:
        batched_product(a, b, out)
    else:
        # The unscaled sums never exist in the dtype of the result.
        torch.baddbmm(out, a, b, beta=0, alpha=share, out=out)


def contract_backward(grad: Tensor, left: Tensor, right: Tensor, outgoing: bool, buffer: Tensor) -> None:
    """Replace factors ``[g, N, N]`` by their gradients, from that of their product; ``buffer [g, N, N]`` is memory."""
    if outgoing:
        batched_product(grad, right, buffer)
        batched_product(grad.mT, left, right)
    else:
        batched_product(right, grad, buffer)
        batched_product(left, grad.mT, right)
    left.copy_(buffer)
