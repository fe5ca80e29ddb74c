"""Outer product mean: what two columns of an alignment have in common becomes their pair's update."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_run_on_triton
from fastfold.kernels.common.gradients import unwritten_gradients, wanted_gradients
from fastfold.kernels.common.scratch import exact_dtype, refuse_gradients, without_autocast
from fastfold.kernels.ops.outer_product_mean import eager

EPS = 1e-3
"""Added to the number of sequences."""


def outer_product_mean_definition(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = EPS,
) -> Tensor:
    """Specification of :func:`outer_product_mean`: holds all ``[*, I, J, c, c]`` products."""
    dtype, exact = left.dtype, torch.promote_types(left.dtype, torch.float32)
    left_mask, right_mask = left_mask.to(exact), right_mask.to(exact)
    left = left.to(exact) * left_mask[..., None]
    right = right.to(exact) * right_mask[..., None]
    products = torch.einsum("...sic,...sje->...ijce", left, right).flatten(-2)
    counts = torch.einsum("...si,...sj->...ij", left_mask, right_mask)
    out = linear(products, weight.to(exact), bias.to(exact)) / (eps + counts[..., None])
    return out.to(dtype)


class OuterProductRows:
    """Rows of :func:`outer_product_mean` one block after the other, without gradients.

    What all blocks need of the right side is prepared once, which is much where the alignment is deep; so it is taken
    in parts, of which no more than one exists beside it.

    Args:
        right: Projected alignment in blocks of sequences ``[*, s, J, c]``, at least one, in order.
        right_mask: ``[*, S, J]``, multiplies ``right``.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        eps: Added to the number of sequences that both columns have.
        backend: As of :func:`outer_product_mean`.

    Raises:
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: If gradients would have to be recorded.
    """

    def __init__(
        self,
        right: Iterable[Tensor],
        right_mask: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float = EPS,
        *,
        backend: str | None = None,
    ) -> None:
        parts = iter(right)
        first = next(parts)
        refuse_gradients(first, weight, bias)
        fixed = right_mask.to(exact_dtype(first)), weight, bias, eps
        on_triton = products_run_on_triton(first, len(bias), backend)
        like, parts = first.new_empty(0), itertools.chain([first], parts)
        del first  # so that it is freed when it has been taken
        self._write: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
        if on_triton:
            from fastfold.kernels.ops.outer_product_mean import triton_fwd

            whole = _joined(parts, right_mask.shape)
            self._write = functools.partial(triton_fwd.forward, whole, *fixed)
        else:
            self._write = eager.Rows(like, parts, *fixed)

    def write(self, out: Tensor, left: Tensor, left_mask: Tensor, residual: Tensor | None = None) -> Tensor:
        """Fill some rows of the result, and give them back.

        Args:
            out: ``[*, I, J, c_z]``; may be ``residual``.
            left: Projected alignment ``[*, S, I, c]`` of these rows.
            left_mask: ``[*, S, I]``, multiplies ``left``.
            residual: ``[*, I, J, c_z]`` to add to the update.
        """
        refuse_gradients(left, residual)
        without_autocast(self._write)(out, left, left_mask, residual)
        return out


def _joined(parts: Iterator[Tensor], sizes: torch.Size) -> Tensor:
    """``[*, S, J, c]`` of blocks of sequences, without a copy of a single one; ``sizes`` are ``[*, S, J]``."""
    part = next(parts)
    if part.shape[:-1] == sizes:
        return part
    whole = part.new_empty(*sizes, part.shape[-1])
    start = 0
    for block in itertools.chain([part], parts):
        whole[..., start : start + block.shape[-3], :, :] = block
        start += block.shape[-3]
    return whole


@torch.library.custom_op("fastfold::outer_product_mean", mutates_args=())
def _outer_product_mean(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    residual: Tensor | None,
    backend: str | None,
) -> Tensor:
    out = left.new_empty(*left.shape[:-3], left.shape[-2], right.shape[-2], len(bias))
    with torch.no_grad():
        rows = OuterProductRows([right], right_mask, weight, bias, eps, backend=backend)
        return rows.write(out, left, left_mask, residual)


@_outer_product_mean.register_fake
def _(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    residual: Tensor | None,
    backend: str | None,
) -> Tensor:
    return left.new_empty(*left.shape[:-3], left.shape[-2], right.shape[-2], bias.shape[0])


@torch.library.custom_op("fastfold::outer_product_mean_backward", mutates_args=())
def _outer_product_mean_backward(
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    """Gradients of both sides, weight and bias; those that nobody ``needs`` are empty."""
    arguments = (grad, left, right, left_mask, right_mask, weight, bias, eps, needs)
    if products_run_on_triton(left, len(bias), backend):
        from fastfold.kernels.ops.outer_product_mean import triton_bwd

        grads = without_autocast(triton_bwd.backward)(*arguments)
    else:
        grads = eager.backward(*arguments)
    return wanted_gradients(grads, (left, right, weight, bias), needs)


@_outer_product_mean_backward.register_fake
def _(
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    needs: Sequence[bool],
    backend: str | None,
) -> list[Tensor]:
    return unwritten_gradients((left, right, weight, bias), needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Keeps only the inputs of the operator."""
    left, right, left_mask, right_mask, weight, bias = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 4, 5)]
    masks = (left_mask, right_mask)
    grads = _outer_product_mean_backward(grad, left, right, *masks, weight, bias, ctx.eps, needs, ctx.backend)
    of_left, of_right, of_weight, of_bias = (
        g if need else None for g, need in zip(grads, needs, strict=True)
    )
    of_residual = grad if ctx.needs_input_grad[7] else None
    return of_left, of_right, None, None, of_weight, of_bias, None, of_residual, None


_outer_product_mean.register_autograd(_differentiate, setup_context=_setup_context)


def outer_product_mean(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = EPS,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mean over the sequences of the outer products of two columns, projected to pair channels.

    ``(Σ_s left[s, i, c] · right[s, j, e] · weight[:, c·C + e] + bias) / (eps + Σ_s left_mask · right_mask)``:
    steps 2 to 4 of algorithm 10 of the AlphaFold supplement. As in its program the bias is divided too.

    Args:
        left: Projected alignment ``[*, S, I, c]``.
        right: Projected alignment ``[*, S, J, c]``.
        left_mask: ``[*, S, I]``, multiplies ``left``. A constant: it receives no gradient.
        right_mask: ``[*, S, J]``, multiplies ``right``. A constant likewise.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        eps: Added to the number of sequences that both columns have.
        residual: ``[*, I, J, c_z]`` to add to the update.
        out: Where the result goes, without recording gradients; may be ``residual``.
        backend: ``auto``, ``triton`` (up to 256 pair channels, more take the PyTorch path) or ``torch``.

    Returns:
        The update ``[*, I, J, c_z]``, plus the residual, in the dtype of ``left``.

    Raises:
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    if out is None:
        return _outer_product_mean(left, right, left_mask, right_mask, weight, bias, eps, residual, backend)
    rows = OuterProductRows([right], right_mask, weight, bias, eps, backend=backend)
    return rows.write(out, left, left_mask, residual)
