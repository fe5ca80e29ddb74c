"""Outer product mean: correlations of two columns of an alignment become the update of their pair."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from fastfold.errors import InputError
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost, size_in_bytes
from fastfold.kernels.common.layout import MAX_CHANNELS
from fastfold.kernels.common.operator import BackwardPass, define_operator
from fastfold.kernels.common.parameters import cast_grads, needed_names
from fastfold.kernels.common.scratch import (
    accumulation_dtype,
    autocast_is_enabled,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.common.shapes import Shape, axes_of, check_shapes
from fastfold.kernels.ops.outer_product_mean import eager
from fastfold.kernels.ops.outer_product_mean.chunk_choice import OuterProductSizes, buffers_of
from fastfold.kernels.ops.outer_product_mean.eager import (
    OuterProductParams,
    PremultipliedRows,
    premultiplying_pays,
    premultiplying_pays_backward,
    side_gradients,
)

EPS = 1e-3  #: Added to the number of sequences


def outer_product_mean_definition(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = EPS,
) -> Tensor:
    """Compute :func:`outer_product_mean` by its specification, with all ``[*, I, J, c, c]`` products in memory."""
    dtype, exact = left.dtype, torch.promote_types(left.dtype, torch.float32)
    left_mask, right_mask = left_mask.to(exact), right_mask.to(exact)
    left = left.to(exact) * left_mask[..., None]
    right = right.to(exact) * right_mask[..., None]
    products = torch.einsum("...sic,...sje->...ijce", left, right).flatten(-2)
    counts = torch.einsum("...si,...sj->...ij", left_mask, right_mask)
    out = linear(products, weight.to(exact), bias.to(exact)) / (eps + counts[..., None])
    return out.to(dtype)


class OuterProductRows:
    """Writer of rows of :func:`outer_product_mean`, block by block, without gradients.

    The right side is prepared once for all blocks, which is much work for a deep alignment. It is taken in parts, and
    only one part exists at a time. ``right`` is in blocks of sequences ``[*, s, J, c]``, at least one, in order; the
    other arguments are those of :func:`outer_product_mean`.

    Raises:
        InputError: A shape does not match that of ``right_mask``.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded.

    Example:
        >>> import torch
        >>> from fastfold.kernels import OuterProductRows, outer_product_mean
        >>> left, right = torch.randn(2, 7, 6, 4)  # 7 sequences, 6 residues, 4 channels
        >>> mask, weight, bias = torch.ones(7, 6), torch.randn(8, 16), torch.randn(8)
        >>> rows, out = OuterProductRows([right], mask, weight, bias), torch.empty(6, 6, 8)
        >>> for own in (slice(0, 4), slice(4, 6)):
        ...     _ = rows.write(out[own], left[:, own], mask[:, own])
        >>> torch.allclose(out, outer_product_mean(left, right, mask, mask, weight, bias), atol=1e-4)
        True
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
        check = (
            _check_right if type(first) is Tensor and not is_dynamo_compiling() else _check_right.__wrapped__
        )
        check(first.dtype, first.shape, right_mask.shape, weight.shape, bias.shape)
        self._mask_shape, self._channels = right_mask.shape, (first.shape[-1], len(bias))
        if torch.is_grad_enabled():
            refuse_gradients(first, weight, bias)
        backend = choose_backend(first, backend, fits=bias.shape[0] <= MAX_CHANNELS)
        is_whole = first.shape[:-1] == right_mask.shape
        # Unlike a list, an iterator frees the part once it is consumed.
        parts = itertools.chain(iter([first]), _check_blocks(parts, first.shape, right_mask.shape))
        self._write: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
        if backend == "triton":
            from fastfold.kernels.ops.outer_product_mean import chunk_choice, chunks, triton_fwd

            in_chunks = chunk_choice.choose_forward(first, right_mask.shape, bias.shape[0])
            masked = chunks.masked_by_channels if in_chunks else triton_fwd.masked
            new = chunks.zeros_by_channels if in_chunks else Tensor.new_empty
            del first
            whole = masked(next(parts), right_mask) if is_whole else _join_blocks(parts, right_mask, new)
            shared = triton_fwd.RightSide(whole, right_mask, weight, bias)
            forward = chunks.forward if in_chunks else triton_fwd.forward
            self._write = functools.partial(forward, shared, eps)
        else:
            like = first.new_empty(0)
            del first
            right_mask = right_mask.to(accumulation_dtype(like))
            kind = PremultipliedRows if premultiplying_pays(like, right_mask, weight) else eager.ProductRows
            self._write = kind(like, parts, right_mask, weight, bias, eps)

    def write(self, out: Tensor, left: Tensor, left_mask: Tensor, residual: Tensor | None = None) -> Tensor:
        """Fill some rows ``[*, I, J, c_z]`` of the result, and return ``out``, which may be ``residual``.

        ``left [*, S, I, c]`` and ``left_mask [*, S, I]`` are these rows of the alignment and its mask.

        Raises:
            InputError: A shape does not match those of the right side.
        """
        if torch.is_grad_enabled():
            refuse_gradients(left, residual)
        check = _check_left if type(left) is Tensor and not is_dynamo_compiling() else _check_left.__wrapped__
        of_residual = None if residual is None else residual.shape
        check(self._mask_shape, self._channels, left.shape, left_mask.shape, of_residual, out.shape)
        fill = without_autocast(self._write) if autocast_is_enabled() else self._write
        fill(out, left, left_mask, residual)
        return out


_NAME = "outer_product_mean"


@functools.lru_cache(maxsize=1024)
def _check_right(dtype: torch.dtype, right: Shape, mask: Shape, weight: Shape, bias: Shape) -> None:
    *lead, rows, columns, c = axes_of(_NAME, "right", right, "s, J, c", dtype)
    sequences = mask[-2] if len(mask) > 1 else rows
    c_z = axes_of(_NAME, "bias", bias, "c_z")[-1]
    wanted = (
        ("right_mask", mask, (*lead, sequences, columns)),
        ("weight", weight, (c_z, c * c)),
        ("bias", bias, (c_z,)),
    )
    check_shapes(_NAME, "right", right, wanted)
    if rows > sequences:
        raise _wrong_count(sequences, rows)


@functools.lru_cache(maxsize=1024)
def _check_left(
    mask: Shape, channels: tuple[int, int], left: Shape, left_mask: Shape, residual: Shape | None, out: Shape
) -> None:
    (*lead, sequences, columns), (c, c_z) = mask, channels
    rows = axes_of(_NAME, "left", left, "S, I, c")[-2]
    pairs = *lead, rows, columns, c_z
    wanted = (
        ("left", left, (*lead, sequences, rows, c)),
        ("left_mask", left_mask, (*lead, sequences, rows)),
        ("residual", residual, pairs),
        ("out", out, pairs),
    )
    check_shapes(_NAME, "right_mask", mask, wanted)


def _wrong_count(sequences: int, count: int) -> InputError:
    return InputError(f"{_NAME}: expected {sequences} sequences in right, found {count}")


def _check_blocks(parts: Iterator[Tensor], first: Shape, mask: Shape) -> Iterator[Tensor]:
    """Check and yield blocks ``[*, s, J, c]`` after the ``first``, with sequences of a mask ``[*, S, J]``."""
    (*lead, sequences, columns), (count, channels) = mask, (first[-3], first[-1])
    for x in parts:
        rows = axes_of(_NAME, "right", x.shape, "s, J, c")[-3]
        shape = (*lead, rows, columns, channels)
        check_shapes(_NAME, "right_mask", mask, [("right", x.shape, shape)])
        count += rows
        if count > sequences:
            break
        checked = [x]
        del x  # before the next one is made
        yield checked.pop()
    if count != sequences:
        raise _wrong_count(sequences, count)


def _join_blocks(
    parts: Iterator[Tensor], mask: Tensor, new: Callable[[Tensor, torch.Size], Tensor]
) -> Tensor:
    """Join blocks of sequences to ``new(block, [*, S, J, c])``, times their ``mask [*, S, J]``."""
    whole, start = None, 0
    for block in parts:
        whole = new(block, torch.Size((*mask.shape, block.shape[-1]))) if whole is None else whole
        rows = slice(start, start + block.shape[-3])
        b_whole = whole[..., rows, : block.shape[-2], :]
        torch.mul(block, mask[..., rows, :, None].to(block.dtype), out=b_whole)
        start = rows.stop
        del block  # before the next one is made
    assert whole is not None
    return whole


def _forward(
    sides: Sequence[Tensor],
    masks: Sequence[Tensor],
    parameters: Sequence[Tensor],
    residual: Tensor | None,
    eps: float,
    backend: str,
) -> Tensor:
    x = OuterProductParams(*sides, *masks, *parameters)
    with torch.no_grad():
        rows = OuterProductRows([x.right], x.right_mask, x.weight, x.bias, eps, backend=backend)
        return rows.write(_fake(sides, masks, parameters), x.left, x.left_mask, residual)


def _fake(
    sides: Sequence[Tensor], masks: Sequence[Tensor], parameters: Sequence[Tensor], *others: Any
) -> Tensor:
    x = OuterProductParams(*sides, *masks, *parameters)
    return x.left.new_empty(*x.left.shape[:-3], x.left.shape[-2], x.right.shape[-2], x.bias.shape[0])


def _compute_gradients(
    grad: Tensor,
    sides: Sequence[Tensor],
    masks: Sequence[Tensor],
    parameters: Sequence[Tensor],
    eps: float,
    needs: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Return gradients of both projections, weight and bias; empty tensors for those not needed."""
    group = OuterProductParams(*sides, *masks, *parameters)
    needed = needed_names(("left", "right", "weight", "bias"), needs)
    grads: Sequence[Tensor | None]
    if backend == "triton":
        from fastfold.kernels.ops.outer_product_mean import chunk_choice, chunks, triton_bwd

        in_chunks = chunk_choice.choose_backward(group.left, group.right.shape[-2], len(group.bias))
        compute = chunks.backward if in_chunks else triton_bwd.backward
        grads = compute(grad, group, eps, needed)
    elif premultiplying_pays_backward(group, needed):
        grads = [*side_gradients(grad, group, eps), None, None]
    else:
        grads = eager.backward(grad, group, eps, needed)
    return cast_grads(grads, (*sides, *parameters), needs)


def outer_product_flops(sequences: int, pairs: int, channels: int, c_z: int) -> tuple[float, float]:
    """Return operations of :func:`outer_product_mean`: outer products, and their projection.

    Pairs of columns are those of all batch elements.
    """
    return 2.0 * sequences * pairs * channels**2, 2.0 * pairs * channels**2 * c_z


def _inputs(call: Arguments) -> OuterProductParams:
    return OuterProductParams(*call["sides"], *call["masks"], *call["parameters"])


def _flops(call: Arguments) -> tuple[float, float]:
    x = _inputs(call)
    *batch, sequences, columns, channels = x.left.shape
    pairs = math.prod(batch) * columns * x.right.shape[-2]
    return outer_product_flops(sequences, pairs, channels, x.bias.shape[0])


def _masked_sides(call: Arguments) -> float:
    """Return the bytes of both projections times their masks."""
    x = _inputs(call)
    return float(size_in_bytes(x.left) + size_in_bytes(x.right))


def _chunk_buffers(call: Arguments, *, backward: bool) -> int:
    """Return the bytes of buffers for products in chunks, 0 where Triton's kernels or PyTorch's tiles compute."""
    x = _inputs(call)
    sequences, rows, c = x.left.shape[-3:]
    sizes = OuterProductSizes(sequences, rows, x.right.shape[-2], c, len(x.bias))
    return buffers_of(x.left, sizes, call["backend"], backward=backward)


def _cost(call: Arguments) -> OperatorCost:
    sides = _masked_sides(call)
    return OperatorCost(
        sum(_flops(call)),
        traffic=2 * sides,
        workspace=sides + _chunk_buffers(call, backward=False),
        launches=4,
    )


def _backward_cost(call: Arguments) -> OperatorCost:
    outer, projection = _flops(call)
    sides = _masked_sides(call)
    return OperatorCost(
        3 * outer + 2 * projection,
        traffic=2 * sides,
        workspace=sides + _chunk_buffers(call, backward=True),
        launches=8,
    )


_outer_product_mean = define_operator(
    "outer_product_mean",
    _forward,
    BackwardPass(_compute_gradients, ("sides", "parameters"), cost=_backward_cost, residual="residual"),
    fake=_fake,
    cost=_cost,
)


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
    """Compute the mean over sequences of outer products of two columns, projected to pair channels.

    ``(Σ_s left[s, i, c] · right[s, j, e] · weight[:, c·C + e] + bias) / (eps + Σ_s left_mask · right_mask)``:
    steps 2 to 4 of algorithm 10 of the AlphaFold supplement. As in AlphaFold's program, the bias is divided too.

    Memory in addition to inputs and result: both projections once more, times their masks. In chunks there are also
    buffers of about 50 MiB, and more for gradients of deep alignments.

    The PyTorch path multiplies ``left`` by the weight first if there are few sequences, which is less work
    (:class:`~fastfold.kernels.ops.outer_product_mean.eager.PremultipliedRows`). So does its backward pass if parameters
    need no gradients; otherwise it computes the products again, tile by tile. On a Hopper GPU, data in bfloat16 takes
    products of PyTorch in chunks of rows where they are predicted faster than Triton's kernels
    (:mod:`~fastfold.kernels.ops.outer_product_mean.chunk_choice`).

    Args:
        left: Projected alignment ``[*, S, I, c]``.
        right: Projected alignment ``[*, S, J, c]``.
        left_mask: ``[*, S, I]``, multiplies ``left``. Gets no gradient.
        right_mask: ``[*, S, J]``, multiplies ``right``. Gets no gradient.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        eps: Added to the number of sequences that both columns have.
        residual: ``[*, I, J, c_z]`` to add to the update.
        out: Tensor for the result, without recording gradients; may be ``residual``.
        backend: ``auto``, ``triton`` (up to 256 pair channels; more use PyTorch) or ``torch``.

    Returns:
        The update ``[*, I, J, c_z]``, plus the residual, in the dtype of ``left``.

    Raises:
        InputError: Shapes or dtypes do not match.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.

    Example:
        >>> import torch
        >>> from fastfold.kernels import outer_product_mean
        >>> left, right = torch.randn(2, 7, 6, 4)  # 7 sequences, 6 residues, 4 channels
        >>> mask, weight, bias = torch.ones(7, 6), torch.randn(8, 16), torch.randn(8)
        >>> found = outer_product_mean(left, right, mask, mask, weight, bias)
        >>> products = torch.einsum("sic,sje->ijce", left, right).flatten(-2)
        >>> torch.allclose(found, (products @ weight.T + bias) / (1e-3 + 7), atol=1e-4)
        True
    """
    axes_of(_NAME, "left", left.shape, "S, I, c", left.dtype)
    axes_of(_NAME, "right", right.shape, "S, J, c", right.dtype)
    if left.dtype != right.dtype:
        raise InputError(
            f"outer_product_mean: expected one dtype, found left {left.dtype} and right {right.dtype}"
        )
    backend = choose_backend(left, backend, fits=bias.numel() <= MAX_CHANNELS)
    if out is None:
        masks = [left_mask, right_mask]
        return _outer_product_mean([left, right], masks, [weight, bias], residual, eps, backend)
    rows = OuterProductRows([right], right_mask, weight, bias, eps, backend=backend)
    return rows.write(out, left, left_mask, residual)
