"""The middle of a triangle multiplication: which edge factors exist when, and where their product waits.

All of a pair tensor takes part in each element of the product, so old and new exist together. The product is made for
a group of channels at a time, because only so many of its factors then exist; with :class:`HostBuffers` its finished
parts leave the device, but for some of its rows, and come back in blocks of rows when all are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements, part
from fastfold.kernels.common.scratch import Scratch
from fastfold.memory.offload import HostBuffers, StreamedRows, kept_rows

SMALL_PRODUCT = 2**24
"""Elements of a product whose gradients are not worth more than one launch for each factor."""


@dataclass(frozen=True)
class ContractionPlan:
    """How the contraction is carried out.

    Attributes:
        channels: Channels whose factors exist at a time; None leaves it to the backend.
        host: Where the product waits; None for the device.
        kept: With ``host``: share of the product's rows that stay on the device, from 0 to 1.
    """

    channels: int | None = None
    host: HostBuffers | None = None
    kept: float = 0.0


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
    """Memory on the device that :func:`multiply` takes in addition to its arguments, without what its backend takes.

    Args:
        n: Length N of the target.
        c: Hidden channels.
        element_size: Bytes per element.
        channels: Channels whose factors exist at a time.
        streamed: Whether the product waits on the host.
        kept: Share of its rows that do not.
        width: See :attr:`TriangleBackend.width`; N by default.
    """
    w = width or n
    factors = 2 * channels * w * w
    first = kept_rows(n, kept) if streamed else n
    if first == n:
        return element_size * (factors + c * w * w)
    rows = min(n - first, block_rows(n, c, channels))
    return element_size * (c * first * w + max(factors, 2 * c * rows * w) + 2 * channels * rows * w)


def block_rows(n: int, c: int, channels: int) -> int:
    """Rows of the blocks that come back: two of them fit where the factors were."""
    return max(1, channels * n // c)


def narrow_group(channels: int, c: int) -> int:
    """Channels whose factors may exist at a time if they and the product have half the bytes, in as much memory.

    Args:
        channels: Channels if they are as wide as the pair.
        c: Hidden channels.
    """
    return min(c, 2 * channels + c // 2)


class TriangleBackend(Protocol):
    """What a backend does before and after the contraction, for one batch element."""

    @property
    def dtype(self) -> torch.dtype:
        """What factors and product are kept in."""

    @property
    def share(self) -> float:
        """Factor that its :meth:`write` wants the product multiplied by."""

    def width(self, n: int) -> int:
        """Rows and columns W that its factors have for a pair of N: N, or more, with zeros."""

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """Fill ``projections [2 count, W, W]``: channels from ``first`` of the left factor, then of the right one."""

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        """Fill rows of the result ``[rows, N, c_z]`` from those of the product ``[c, rows, W]`` times its share.

        All rows may be in a product of W.
        """


class TriangleGradients(Protocol):
    """What a backend does in the backward pass of one batch element; it sums the gradients of the parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """What factors, product and their gradients are kept in."""

    @property
    def channels(self) -> int:
        """Hidden channels c."""

    @property
    def share(self) -> float:
        """Factor that its :meth:`update_backward` wants the product multiplied by."""

    def contraction_groups(self, n: int) -> tuple[int, int]:
        """Channels that are contracted at a time, and of which the gradients are."""

    def width(self, n: int) -> int:
        """As of :class:`TriangleBackend`; gradients have zeros there as well."""

    def project(self, projections: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        """As of :class:`TriangleBackend`, in ``dtype``."""

    def update_backward(
        self, grad_z: Tensor, product: Tensor, grad: Tensor, z: Tensor, dropout: Tensor | None
    ) -> None:
        """Put the gradient of ``product [c, W, W]`` in its place, and that of the normalised ``z`` into ``grad_z``.

        What it gets is the product times its share, and what it leaves is the gradient without it.
        """

    def factors_backward(
        self, grad_z: Tensor, grad_factors: Tensor, z: Tensor, mask: Tensor, add: Tensor | None
    ) -> None:
        """Turn ``grad_z`` into the gradient of ``z``, plus ``add``, with what the factors ``[2 c, W, W]`` give."""

    def norm_backward(self, grad_z: Tensor, z: Tensor) -> Tensor:
        """The gradient of ``z`` if nothing else than the update depends on it."""

    def factor_grads(self) -> Sequence[Tensor | None]:
        """Gradients of the parameters of the first part; None for those that nobody needs."""

    def update_grads(self) -> Sequence[Tensor | None]:
        """Gradients of the parameters of the second part."""


def multiply(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    backend: TriangleBackend,
    *,
    residual: Tensor | None,
    dropout: Tensor | None,
    outgoing: bool,
    c: int,
    channels: int,
    scratch: Scratch,
    host: HostBuffers | None,
    kept: float = 0.0,
) -> None:
    """Fill ``out [*, N, N, c_z]``, which may be ``z`` or ``residual``.

    Args:
        out: Where the result goes.
        z: Pair tensor.
        mask: ``[*, N, N]``.
        backend: What happens before and after the contraction.
        residual: Of the shape of ``z``, or None.
        dropout: Of the shape of ``z``, or None.
        outgoing: Which of the two contractions.
        c: Hidden channels.
        channels: Channels whose factors exist at a time.
        scratch: Buffers, of the device of ``z``.
        host: Where the product waits; None for the device.
        kept: With ``host``: share of the product's rows that stay on the device.
    """
    n, scratch = z.shape[-2], scratch.of(z, backend.dtype)
    how: dict[str, Any] = {
        "outgoing": outgoing,
        "c": c,
        "channels": channels,
        "scratch": scratch,
        "host": host,
        "kept": kept,
    }
    for i in batch_elements(z):
        for rows, product in _product(part(z, i), part(mask, i), backend, **how):
            here: tuple[int | slice, ...] = i if rows == slice(0, n) else (*i, rows)
            b_out, b_z, b_residual, b_dropout = (part(x, here) for x in (out, z, residual, dropout))
            assert b_out is not None
            assert b_z is not None
            product = product if product.dim() == 3 else product.view(c, -1, backend.width(n))
            backend.write(b_out, product, b_z, b_residual, b_dropout)


def _product(
    z: Tensor,
    mask: Tensor,
    backend: TriangleBackend,
    *,
    outgoing: bool,
    c: int,
    channels: int,
    scratch: Scratch,
    host: HostBuffers | None,
    kept: float,
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of the product with their content ``[c, rows, W]``, when all of it is there."""
    n = z.shape[-2]
    w = backend.width(n)
    first_away = n if host is None else kept_rows(n, kept)
    size = block_rows(n, c, channels)
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
        # The factors are done with: what comes back takes their place.
        back = scratch("factors", 2, c * min(size, n - first_away) * w)
        yield from streamed.read((back[0], back[1]))


def contract(
    left: Tensor, right: Tensor, rows: slice, outgoing: bool, out: Tensor, share: float = 1.0
) -> None:
    """Fill rows of the sums over all triangles times a share, ``out [g, rows, N]``, from factors ``[g, N, N]``."""
    whole = rows == slice(0, left.shape[-1])
    if outgoing:
        _multiply(left if whole else left[:, rows], right.mT, out, share)
    else:
        _multiply((right if whole else right[:, :, rows]).mT, left, out, share)


def contract_backward(grad: Tensor, left: Tensor, right: Tensor, outgoing: bool, buffer: Tensor) -> None:
    """Put the gradients of factors ``[g, N, N]`` in their place, from that of their product.

    Args:
        grad: ``[g, N, N]``.
        left: Overwritten by its gradient.
        right: Overwritten by its gradient too.
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


def _multiply(a: Tensor, b: Tensor, out: Tensor, share: float) -> None:
    """Fill ``out [g, M, N]`` with ``share · a @ b``: the sums themselves never exist in the dtype of ``out``."""
    if share == 1.0:
        torch.bmm(a, b, out=out)
    else:
        torch.baddbmm(out, a, b, beta=0, alpha=share, out=out)
