"""Passes of triangle multiplication, and of each of its two parts, one batch element at a time.

This module decides which tensors exist at a time; a backend, ``eager`` or ``triton_launch``, computes the parts before
and after the contraction. Between them the channels come first, ``[c, N, N]``, so that the contraction is a batch of
plain matrix products; the projections write and read this layout.

All of a pair tensor takes part in each element of the product, so old and new exist together. The product is computed
for a group of channels at a time, so that only the group's factors exist. With :class:`HostBuffers` finished
parts of the product, except for some of its rows, go to the host. They return in blocks of rows when all are complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fastfold.kernels.common.layout import batch_elements, part
from fastfold.kernels.common.parameters import cast_grads, needed_names
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu.linear import batched_product
from fastfold.kernels.ops.triangle_multiplication import eager
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, TriangleParams, UpdateParams
from fastfold.memory.offload import HostBuffers, StreamedRows, kept_rows

if TYPE_CHECKING:
    from fastfold.kernels.ops.triangle_multiplication import triton_launch

    ForwardSteps = eager.TriangleForward | triton_launch.TritonTriangleForward
    GradientSteps = eager.TriangleGradients | triton_launch.TritonTriangleGradients


class _TriangleBackend(Protocol):
    """Module with the operations before and after the contraction."""

    def channel_group(self, c: int, positions: int) -> int: ...
    def forward_steps(
        self, factors: FactorParams | None, update: UpdateParams | None, scratch: Scratch, summands: int = 1
    ) -> ForwardSteps: ...
    def gradient_steps(
        self,
        factors: FactorParams | None,
        update: UpdateParams | None,
        z: Tensor,
        needed: Collection[str],
        summands: int = 1,
    ) -> GradientSteps: ...


def _backend(backend: str) -> _TriangleBackend:
    if backend == "triton":
        from fastfold.kernels.ops.triangle_multiplication import triton_launch

        return triton_launch
    return eager


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


def forward(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    parameters: TriangleParams,
    *,
    residual: Tensor | None,
    dropout: Tensor | None,
    outgoing: bool,
    backend: str,
    scratch: Scratch | None = None,
    plan: ContractionPlan | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Fill ``out``, which may be ``z`` or ``residual``, without autocast.

    Arguments are those of ``triangle_multiplication``. PyTorch fills ``kept [4 c N N]`` with the projections of a
    single pair representation for :func:`backward`.
    """
    operations: _TriangleBackend = eager if backend == "torch" else _backend(backend)
    plan, c = plan or ContractionPlan(), parameters.out_weight.shape[1]
    scratch = Scratch(z.device, z.dtype) if scratch is None else scratch.of(z)
    steps = operations.forward_steps(parameters.factors, parameters.update, scratch, summands=z.shape[-2])
    channels = min(c, plan.channels or operations.channel_group(c, z.shape[-2] ** 2))
    in_bfloat16 = steps.dtype == torch.bfloat16 and z.device.type == "cpu"
    if plan.host is None and in_bfloat16 and (z.dtype != torch.bfloat16 or plan.channels is None):
        # Each group normalises the pair again, which takes as long as its products.
        channels = narrow_group(channels, c)
    if kept is not None:
        assert isinstance(steps, eager.TriangleForward)
        steps.keep(kept, z.shape[:-1].numel())
        channels = c
    multiply(
        *(out, z, mask, steps, ContractionPlan(channels, plan.host, plan.kept)),
        residual=residual,
        dropout=None if dropout is None else dropout.expand_as(z),
        outgoing=outgoing,
        c=c,
        scratch=scratch,
    )
    return out


def multiply(
    out: Tensor,
    z: Tensor,
    mask: Tensor,
    steps: ForwardSteps,
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
                *(out[i], z[i], mask[i], steps, plan),
                residual=part(residual, i),
                dropout=part(dropout, i),
                outgoing=outgoing,
                c=c,
                scratch=scratch,
            )
        return
    if not z.numel():
        return
    n, channels, scratch = z.shape[-2], plan.channels or c, scratch.of(z, steps.dtype)
    w = steps.width(n)
    first_away = n if plan.host is None else kept_rows(n, plan.kept)
    here = slice(0, w if first_away == n else first_away)
    product = scratch("product", c, here.stop, w) if first_away else None
    streamed, divided, blocks = None, None, list[slice]()
    if plan.host is not None and first_away < n:
        size = block_rows(n, c, channels)
        blocks = [slice(start, min(n, start + size)) for start in range(first_away, n, size)]
        staging = scratch("staging", 2, min(c, channels) * min(size, n - first_away) * w)
        streamed = StreamedRows(plan.host, c, blocks, w, (staging[0], staging[1]), staging)
    for first in range(0, c, channels):
        count = min(channels, c - first)
        factors = scratch("factors", 2 * count, w, w)
        steps.project(factors, z, mask, first, count)
        if factors is not divided:  # every view costs host time
            left, right = factors.chunk(2)
            divided = factors
        if product is not None:
            group = product if count == c else product[first : first + count]
            contract(left, right, here, outgoing, group, steps.share)
        if streamed is not None:
            for index, rows in enumerate(blocks):
                waiting = streamed.part(count, index)
                contract(left, right, rows, outgoing, waiting, steps.share)
                streamed.send(waiting, first, index)
    if streamed is None:
        assert product is not None  # all rows are on the device
        steps.write(out, product, z, residual, dropout)
        return
    # Factors are no longer needed: blocks from the host take their memory.
    back = scratch("factors", 2, c * (blocks[0].stop - first_away) * w)
    on_device = [] if product is None else [(slice(0, first_away), product)]
    for rows, b_product in itertools.chain(on_device, streamed.read((back[0], back[1]))):
        steps.write(out[rows], b_product, z[rows], part(residual, (rows,)), part(dropout, (rows,)))


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


def backward(
    grad: Tensor,
    z: Tensor,
    out: Sequence[Tensor],
    mask: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    outgoing: bool,
    add_z: bool,
    needs: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Return gradients of ``z`` and the parameters from that of the result; empty tensors for those not needed.

    Everything is recomputed from the inputs of ``triangle_multiplication``, but for ``out``: the memory that
    :func:`forward` filled, or nothing. In addition to the result there are three
    tensors ``[c, N, N]`` of one batch element, and a part of one. With ``add_z``, ``z`` is also the residual.
    """
    group, dropout = TriangleParams(*parameters), None if dropout is None else dropout.expand_as(z)
    needed = needed_names(("z", *group._fields), needs)
    steps = _backend(backend).gradient_steps(group.factors, group.update, z, needed, summands=z.shape[-2])
    if out:
        assert isinstance(steps, eager.TriangleGradients)
        steps.keep(out[0], z.shape[:-1].numel(), is_filled=True)
    grad_z = torch.empty_like(z, dtype=steps.dtype)
    for i in batch_elements(z):
        b_grad_z, b_grad, b_z, b_mask = (part(x, i) for x in (grad_z, grad, z, mask))
        factors = _factors_and_gradients(steps, b_grad_z, b_grad, b_z, b_mask, part(dropout, i), outgoing)
        steps.factors_backward(b_grad_z, factors, b_z, b_mask, b_grad if add_z else None)
    return cast_grads([grad_z, *steps.factor_grads(), *steps.update_grads()[2:]], (z, *parameters), needs)


def _factors_and_gradients(
    steps: GradientSteps,
    grad_z: Tensor,
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    dropout: Tensor | None,
    outgoing: bool,
) -> Tensor:
    """Return gradients of the factors ``[2 c, W, W]``; ``grad_z`` becomes the gradient of the normalised ``z``."""
    n, c = z.shape[-2], steps.channels
    w = steps.width(n)
    factors, product = (z.new_empty(k, w, w, dtype=steps.dtype) for k in (2 * c, c))
    steps.project(factors, z, mask, 0, c)
    left, right = factors[:c], factors[c:]
    group, group_backward = steps.contraction_groups(n)
    for b_left, b_right, b_product in _channels(group, left, right, product):
        contract(b_left, b_right, slice(0, w), outgoing, b_product, steps.share)
    # This replaces the product by its gradient, and fills grad_z with the gradient of LN(z).
    steps.update_backward(grad_z, product, grad, z, dropout)
    buffer = torch.empty_like(left[:group_backward])
    for b_product, b_left, b_right in _channels(group_backward, product, left, right):
        contract_backward(b_product, b_left, b_right, outgoing, buffer[: len(b_product)])
    return factors


def _channels(group: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split ``[c, N, N]`` tensors into groups of channels."""
    return zip(*(x.split(group) for x in tensors), strict=True)


def factors(out: Tensor, z: Tensor, mask: Tensor, parameters: FactorParams, *, backend: str) -> None:
    """Fill ``out [*, 2 c, R, N]`` with the factors of ``z [*, R, N, c_z]``."""
    steps = _backend(backend).forward_steps(parameters, None, Scratch().of(z))
    for i in batch_elements(z):
        steps.project(out[i], z[i], mask[i], 0, out.shape[-3] // 2)


def factors_backward(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    parameters: FactorParams,
    *,
    grad_normed: Tensor | None,
    add: Tensor | None,
    needed: Collection[str],
    backend: str,
) -> list[Tensor | None]:
    """Return gradients of ``z`` and of the parameters, from those of the factors ``[*, 2 c, R, N]``.

    ``grad_normed`` is the gradient of the normalised ``z`` from other operators, and ``add`` that of ``z`` itself.
    Gradients of parameters that are not ``needed`` may be None or zeros.
    """
    steps = _backend(backend).gradient_steps(parameters, None, z, needed)
    grad, grad_z = grad.to(steps.dtype).contiguous(), torch.empty_like(z, dtype=steps.dtype)
    _ = grad_z.zero_() if grad_normed is None else grad_z.copy_(grad_normed)
    for i in batch_elements(z):
        steps.factors_backward(grad_z[i], grad[i], z[i], mask[i], part(add, i))
    return [grad_z, *steps.factor_grads()]


def update(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    parameters: UpdateParams,
    *,
    dropout: Tensor | None,
    add_z: bool,
    backend: str,
) -> Tensor:
    """Fill ``out [*, R, N, c_z]``, which may be ``z``, from ``product [*, c, R, N]`` and ``z``."""
    product = product.to(z.dtype).contiguous()
    dropout = None if dropout is None else dropout.expand_as(z)
    steps = _backend(backend).forward_steps(None, parameters, Scratch().of(z))
    for i in batch_elements(z):
        steps.write(out[i], product[i], z[i], z[i] if add_z else None, part(dropout, i))
    return out


def update_backward(
    grad: Tensor,
    product: Tensor,
    z: Tensor,
    parameters: UpdateParams,
    *,
    dropout: Tensor | None,
    normed: bool,
    needed: Collection[str],
    backend: str,
) -> list[Tensor | None]:
    """Return gradients of product, ``z`` and the parameters; with ``normed`` of the normalised ``z`` instead.

    Gradients of parameters that are not ``needed`` may be None or zeros.
    """
    dropout = None if dropout is None else dropout.expand_as(z)
    steps = _backend(backend).gradient_steps(None, parameters, z, needed)
    rows, n = z.shape[-3:-1]
    padded = product.new_zeros(*product.shape[:-2], steps.width(rows), steps.width(n), dtype=steps.dtype)
    grad_product = padded[..., :rows, :n].copy_(product)
    grad_z = torch.empty_like(z, dtype=steps.dtype)
    for i in batch_elements(z):
        steps.update_backward(grad_z[i], padded[i], grad[i], z[i], part(dropout, i))
    grad_z = grad_z if normed else steps.norm_backward(grad_z, z)
    return [grad_product, grad_z, *steps.update_grads()]
