"""Products in the operators' PyTorch paths: in the dtype of the data, or with fewer bits on a CPU.

Within :func:`reduced_products`, operators on a CPU multiply float32 data in bfloat16 or 8 bits, for which processors
have faster units than for float32. In bfloat16, data keep this dtype from an operator's normalisation to its residual,
and activations, gates and residuals are parts of products (:class:`PreparedLinear`). Sums and statistics are float32 or
int32.

After a normalisation, positions have much in common (``benchmarks/results/choices.md`` has shares). Rounding the common
part costs twice: it widens the steps of 8 bits, and its rounding errors are equal everywhere, so they do not average
out. So reduced-precision products get the rest of the data: ``W x + b = W (x - m) + (b + W m)``, with the part in
brackets exact. The mean ``m`` is that of a sample: another sample gives the same result except for rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from fastfold.kernels.common.backend import is_traced
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    Scratch,
    accumulation_dtype,
    block_positions,
    finish,
    normalize,
    position_blocks,
)
from fastfold.kernels.cpu.products import (
    multiplies_bfloat16,
    onednn_linear,
    onednn_linear_with,
    onednn_multiplies,
    pack_weight,
)

Products = Literal["bf16", "int8"]
Least = Literal["int8", "int8x2", "bf16", "fp32"]
"""Minimum precision of a product: weights in one or two words of 8 bits, bfloat16, or float32."""

_PRODUCTS: ContextVar[Products | None] = ContextVar("products", default=None)
requested_products = _PRODUCTS.get
"""Return the argument of :func:`reduced_products` that applies at the moment; None outside."""
_LARGEST = 127
_OFFSET = 128  # of eight bits without a sign
_WORDS = 32  # size of a step of a weight's first word, in steps of its second
_PACKED_POSITIONS = {torch.float32: 4096, torch.bfloat16: 16384}
_PACKED_ELEMENTS = 2**16
"""Least positions and weights for which packing once takes less time than packing in each of the calls."""

_ONEDNN_SIDE = 160
"""Minimum side of matrices that oneDNN multiplies one by one faster than MKL multiplies them in a batch."""

_ROOM = 32
"""Inputs in addition to a product's own that hold its bias; matrix units read this many at a time."""

_LARGEST_WEIGHT = 1e30
"""Maximum weight whose sums of products with normalised data are numbers in any case."""


@contextmanager
def reduced_products(products: Products) -> Iterator[None]:
    """Let operators on a CPU multiply float32 data with fewer bits.

    For inference only: backward passes that compute projections again would round these, but not their other products.

    Args:
        products: ``bf16`` or ``int8``. ``int8`` takes rows of the data in 8 bits, and weights in one or two words of 8
            bits, with a scale for each position and output channel. A processor that multiplies bfloat16 does so for
            ``int8`` too, because rounding to 8 bits takes longer than it saves (``benchmarks/results/choices.md``).
    """
    token = _PRODUCTS.set(products)
    try:
        yield
    finally:
        _PRODUCTS.reset(token)


def reduced(x: Tensor | Scratch) -> Products | None:
    """Return the precision of products with weights like ``x``; None for their own dtype."""
    products = requested_products() if x.dtype == torch.float32 and x.device.type != "cuda" else None
    return "bf16" if products == "int8" and multiplies_bfloat16() else products


def product_dtype(x: Tensor | Scratch) -> torch.dtype:
    """Return the dtype of data like ``x`` within an operator, from its normalisation to its residual."""
    return torch.bfloat16 if requested_products() is not None and reduced(x) == "bf16" else x.dtype


def multiplies_units(x: Tensor) -> bool:
    """Return True if the processor has units for products of data like ``x`` in bfloat16."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and multiplies_bfloat16()


def gradient_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of data and products of a backward pass for data like ``x``; sums are exact.

    It is bfloat16 for bfloat16 on a processor with units for it, as in the forward pass; otherwise an exact dtype.
    """
    return x.dtype if multiplies_units(x) else accumulation_dtype(x)


def can_keep(x: Tensor) -> bool:
    """Return True if the backward pass of PyTorch's path for ``x`` can read values that the forward pass kept."""
    same = gradient_dtype(x) == x.dtype and requested_products() is None
    return same and torch.is_grad_enabled()


def add_product(total: Tensor, a: Tensor, b: Tensor, scratch: Scratch, data: Tensor) -> None:
    """Add the product of two matrices to ``total``, the gradient of a weight that is summed over blocks.

    The matrices are rounded to bfloat16 if the operator's ``data`` are, on a processor with units for it.
    """
    out = scratch.of(total)("product of a block", *total.shape)
    # addmm_ may add each summand of a small matrix to the total, whose errors then grow with all positions.
    if multiplies_units(data):
        total.add_(out.copy_(torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16))))
    else:
        total.add_(matrix_product(a, b, out))


def add_products(total: Tensor, a: Tensor, b: Tensor, scratch: Scratch) -> None:
    """Add the product of matrices, or of batches ``[B, M, K]`` and ``[B, K, N]``, to ``total`` in an exact dtype.

    ``scratch`` has the dtype of the matrices.
    """
    if a.dtype != total.dtype:
        total.add_(torch.matmul(a, b, out=scratch("products of a block", *total.shape)))
    elif total.dim() == 2 and by_onednn(a):
        total.add_(onednn_linear(a, b.t()))
    elif total.dim() == 2:
        total.addmm_(a, b)
    else:
        total.baddbmm_(a, b)


def matrix_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Fill ``out [M, N]`` with the product of ``a [M, K]`` and ``b [K, N]``, by oneDNN if that is faster."""
    return out.copy_(onednn_linear(a, b.t())) if by_onednn(a) else torch.mm(a, b, out=out)


def batched_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply a batch of matrices, by oneDNN if that is faster.

    ``out [B, M, N]`` is filled with the products of ``a [B, M, K]`` and ``b [B, K, N]``.
    """
    if min(*a.shape[1:], out.shape[2]) < _ONEDNN_SIDE or not by_onednn(a) or is_traced():
        return torch.bmm(a, b, out=out)
    for left, right, product in zip(a, b.mT, out, strict=True):
        product.copy_(onednn_linear(left, right))
    return out


def by_onednn(x: Tensor) -> bool:
    """Return True if oneDNN multiplies data like ``x`` in their own dtype: float32 within ``exact_products``."""
    return x.dtype == torch.float32 and not x.is_cuda and onednn_multiplies()


class PreparedLinear:
    """Product ``x Wᵀ + b`` for successive blocks of positions, prepared once per call of an operator.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]``, or None.
        relu: True to apply a ReLU to the result.
        keep_nan: False if the ReLU may turn NaN into zero, which takes less time.
        sigmoid: True to apply a sigmoid to the result.
        positive: True if no element of ``x`` is negative, as after a ReLU: 8 bits are then unsigned, and their steps
            are half as wide.
        mean: ``[K]``, mean of the positions of ``x``, if known: the bias then corrects the rounding of the weights for
            it.
        least: Minimum precision of the product.
        positions: Number of positions in all calls, if known; the weight is laid out for many once.

    Attributes:
        products: Precision of the product; None for the dtype of the data.
    """

    products: Products | None = None
    _within: Literal["none", "relu", "sigmoid"] = "none"  # activation within the product
    _after: Callable[[Tensor], Tensor] | None = None  # activation in place, unless the product contains it
    _with_bias: Tensor | None = None
    _by_onednn = False

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        relu: bool = False,
        keep_nan: bool = True,
        sigmoid: bool = False,
        positive: bool = False,
        mean: Tensor | None = None,
        least: Least = "int8x2",
        positions: int = 0,
    ) -> None:
        self._weight, self._bias, self._outputs = weight, bias, weight.shape[0]
        if relu or sigmoid:
            self._after = Tensor.sigmoid_ if sigmoid else Tensor.relu_
        if weight.dtype != torch.bfloat16 and requested_products() is None and not onednn_multiplies():
            return
        self.products = None if least == "fp32" else reduced(weight)
        if self.products == "int8" and (least == "bf16" or weight.shape[1] > max_inputs(positive)):
            self.products = None
        elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
            self.products = "bf16"
        if self.products == "bf16" and multiplies_bfloat16():
            if sigmoid:
                self._within = "sigmoid"
            elif relu and not keep_nan and _is_finite(weight):
                self._within = "relu"
            if self._within != "none":
                self._after = None
        self._by_onednn = self.products is None and by_onednn(weight)
        if self._by_onednn:
            self._weight = weight.contiguous()
        elif self.products == "bf16":
            self._weight = weight.to(torch.bfloat16)
        elif self.products == "int8":
            self._weight, self._scale = split_into_words(weight, 1 if least == "int8" else 2)
            self._offsets = self._integers().sum(-1, dtype=torch.int32).mul_(_OFFSET) if positive else None
        self._packed = self._weight
        is_onednns = self._by_onednn or (self.products == "bf16" and multiplies_bfloat16())
        if (
            is_onednns
            and weight.device.type == "cpu"
            and weight.numel() >= _PACKED_ELEMENTS
            and positions >= _PACKED_POSITIONS[self._weight.dtype]
            and not is_traced()
        ):
            self._packed = pack_weight(self._weight.detach(), block_positions(len(weight)))
        if mean is not None and self.products is not None:
            rounded = self._weight if self.products == "bf16" else self._integers() * self._scale[:, None]
            missing = torch.mv(weight - rounded, mean)
            self._bias = missing if bias is None else bias + missing

    def __call__(self, x: Tensor, name: str, scratch: Scratch) -> Tensor:
        """Return ``[n, N]`` for ``x [n, K]``, in the dtype of ``scratch``, in its buffer ``name`` or in new memory."""
        if self._by_onednn:
            return self._activate(onednn_linear(x, self._packed, self._bias))
        if self.products == "bf16" and scratch.dtype == torch.bfloat16:
            return self._activate(self._multiply(x))
        if self.products is not None or name in scratch.buffers:
            return self.fill(scratch(name, x.shape[0], self._outputs), x, scratch)
        # One operator instead of three, because every operator costs host time.
        out = scratch.buffers[name] = linear(x, self._weight, self._bias)
        return out if self._after is None else self._after(out)

    def update(
        self, out: Tensor, x: Tensor, residual: Tensor | None, dropout: Tensor | None, scratch: Scratch
    ) -> None:
        """Write ``residual + dropout * product`` to ``out [*, N]``, maybe the residual, for ``x [n, K]``."""
        if (
            self.products == "bf16"
            and dropout is None
            and residual is not None
            and multiplies_units(residual)
            and (self._bias is None or self._bias.dtype == residual.dtype)
        ):
            rows = residual.reshape(len(x), self._outputs)
            out.copy_(onednn_linear_with(x, self._packed, self._bias, rows, "add").view(out.shape))
            return
        product = self(x, "update", scratch)
        if out.dim() != 2:
            product = product.view(out.shape)
        if dropout is None and residual is not None:
            torch.add(residual, product, out=out)
        else:
            finish(out, product, residual, dropout)

    def gated(self, x: Tensor, gate: Tensor, scratch: Scratch) -> Tensor:
        """Return the product for ``x [n, K]`` times ``gate [n, N]``, in their dtype, which may be overwritten."""
        if self.products != "bf16" or self._bias is None or not multiplies_units(x) or is_traced():
            return gate.mul_(self(x, "gated", scratch))
        with_ones, weight = self._append_bias(x, scratch)
        return onednn_linear_with(with_ones, weight, None, gate, "mul")

    def by_channel(self, x: Tensor, name: str, scratch: Scratch) -> Tensor:
        """Return ``[N, n]`` for ``x [n, K]``, as :meth:`__call__` does."""
        narrow = self.products == "bf16" and scratch.dtype == torch.bfloat16 and multiplies_bfloat16()
        if narrow and self._within == "none" and not is_traced():
            return self._activate(self._multiply_by_channel(x, scratch(name, self._outputs, len(x)), scratch))
        if not self._by_onednn:
            rows = x.shape[0]
            out = scratch(name, self._outputs, rows)
            # cuBLAS refuses the strides of a single row's transposed view.
            self.fill(out.view(1, -1) if rows == 1 else out.t(), x, scratch)
            return out
        out = onednn_linear(self._weight, x)
        return self._activate(out if self._bias is None else out.add_(self._bias[:, None]))

    def fill(self, out: Tensor, x: Tensor, scratch: Scratch) -> Tensor:
        """Fill ``out [n, N]``, which may be a view of other strides, from ``x [n, K]``.

        ``x`` may be in bfloat16 if the product is.
        """
        if self._by_onednn or self.products == "bf16":
            self._fill_from_product(out, x, scratch)
        elif self.products == "int8":
            for b_out, b_x in position_blocks(BLOCK_ELEMENTS // self._outputs, out, x):
                self._fill_in_int8(b_out, b_x, scratch)
        elif self._bias is None:
            torch.mm(x, self._weight.t(), out=out)
        else:
            torch.addmm(self._bias, x, self._weight.t(), out=out)
        return out if self._after is None else self._after(out)

    def _activate(self, out: Tensor) -> Tensor:
        return out if self._after is None else self._after(out)

    def _multiply(self, x: Tensor) -> Tensor:
        """Compute the product of bfloat16 data, summed in float32 and rounded once."""
        if multiplies_bfloat16():
            return onednn_linear(x, self._packed, self._bias, self._within)
        bias = None if self._bias is None else self._bias.float()
        return linear(x.float(), self._weight.float(), bias).to(x.dtype)

    def _multiply_by_channel(self, x: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
        """Fill ``out [N, n]`` from bfloat16 data ``x [n, K]``."""
        if self._bias is None:
            return torch.mm(self._weight, x.t(), out=out)
        with_ones, weight = self._append_bias(x, scratch)
        return torch.mm(weight, with_ones.t(), out=out)

    def _append_bias(self, x: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return data ``x [n, K]`` with more inputs of one, and the weight with a bias as more inputs: exact in sum."""
        # Adding a bias later would read the whole result once more, or round the bias.
        assert self._bias is not None
        inputs = x.shape[1]
        if self._with_bias is None:
            exact = self._bias.float()[:, None]
            rounded = exact.to(x.dtype)
            parts = (self._weight, rounded, (exact - rounded).to(x.dtype))
            self._with_bias = pad(torch.cat(parts, 1), (0, -(inputs + 2) % _ROOM))
        with_ones = scratch("x with ones", len(x), self._with_bias.shape[1])
        with_ones[:, :inputs] = x
        with_ones[:, inputs:] = 1
        return with_ones, self._with_bias

    def _fill_from_product(self, out: Tensor, x: Tensor, scratch: Scratch) -> None:
        if not self._by_onednn:
            out.copy_(self._multiply(_round_to_bfloat16(x, scratch)))
        elif _is_column_major(out):
            out.copy_(onednn_linear(self._weight, x).t())
            if self._bias is not None:
                out.add_(self._bias)
        else:
            out.copy_(onednn_linear(x, self._packed, self._bias))

    def _fill_in_int8(self, out: Tensor, x: Tensor, scratch: Scratch) -> None:
        rounded, step = _round_to_int8(x, scratch, positive=self._offsets is not None)
        integers = scratch.of(x, torch.int32)
        if _is_column_major(out):
            sums = integers("linear sums", len(self._weight), len(x))
            whole = join_words(torch._int_mm(self._weight, rounded.t(), out=sums), self._outputs, 0)
            if self._offsets is not None:
                whole.add_(self._offsets[:, None])
            # In two operators: addcmul is slow where it reads one number for a whole row.
            out.t().copy_(whole).mul_(step.t()).mul_(self._scale[:, None])
            if self._bias is not None:
                out.add_(self._bias)
            return
        sums = integers("linear sums", len(x), len(self._weight))
        whole = join_words(torch._int_mm(rounded, self._weight.t(), out=sums), self._outputs, -1)
        if self._offsets is not None:
            whole.add_(self._offsets)
        # Scaled after a copy, because arithmetic of two dtypes is slow.
        out.copy_(whole).mul_(step)
        if self._bias is None:
            out.mul_(self._scale)
        else:
            torch.addcmul(self._bias, out, self._scale, out=out)

    def _integers(self) -> Tensor:
        """Return the 8-bit weights as whole numbers of steps, ``[N, K]``, in int32."""
        return join_words(self._weight.int(), self._outputs, 0)


def join_words(x: Tensor, outputs: int, dim: int) -> Tensor:
    """Combine the words of each output along ``dim`` in place, or their sums; inverse of :func:`split_into_words`.

    The result is in steps of the last word. There are as many words as ``outputs``, or twice as many.
    """
    if x.shape[dim] == outputs:
        return x
    first, second = x.chunk(2, dim)
    return torch.add(second, first, alpha=_WORDS, out=first)


def max_inputs(positive: bool = False) -> int:
    """Return the maximum number of inputs of int8 products summed in int32; unsigned data if ``positive``."""
    largest = _LARGEST + _OFFSET if positive else _LARGEST
    return (2**31 - 1) // (largest * _LARGEST * (_WORDS + 1))


def _is_finite(weight: Tensor) -> bool:
    """Return True if no product of normalised data with a weight is NaN."""
    return not is_traced() and bool(weight.abs().amax() < _LARGEST_WEIGHT)


def _round_to_bfloat16(x: Tensor, scratch: Scratch) -> Tensor:
    return x if x.dtype == torch.bfloat16 else scratch.of(x, torch.bfloat16).copy("linear x", x)


def _is_column_major(x: Tensor) -> bool:
    return x.stride(0) == 1 != x.stride(1)


def split_into_words(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split a float32 weight ``[N, K]`` into one or two words of 8 bits, all first words before all second ones.

    Returns:
        Words, int8 ``[count * N, K]``, and the scales ``[N]`` of the last words.
    """
    step = (weight.abs().amax(-1, keepdim=True)).clamp_(min=torch.finfo(weight.dtype).tiny).div_(_LARGEST)
    first = (weight / step).round_()
    if count == 1:
        return first.to(torch.int8), step.flatten()
    second = ((weight - first * step) * (_WORDS / step)).round_()
    return torch.cat([first, second]).to(torch.int8), step.flatten() / _WORDS


def _round_to_int8(x: Tensor, scratch: Scratch, *, positive: bool) -> tuple[Tensor, Tensor]:
    """Round the rows of a block ``[n, K]`` to int8; return them and their steps ``[n, 1]``.

    An offset is subtracted if ``positive``. The step of a row that is not finite is not finite.
    """
    step = x.amax(-1, keepdim=True)
    if not positive:
        step = torch.maximum(step, x.amin(-1, keepdim=True).neg_())
    step.clamp_(min=torch.finfo(x.dtype).tiny).div_(_LARGEST + _OFFSET if positive else _LARGEST)
    buffer = torch.div(x, step, out=scratch("linear x", *x.shape)).round_()
    if positive:
        buffer.sub_(_OFFSET)
    return scratch.of(x, torch.int8).copy("linear x", buffer), step


SAMPLE = 256
"""Maximum number of positions of a sample; a small tensor gives an eighth of its positions."""

# Multiples of the golden ratio fill the unit interval evenly, without the period of any axis.
_GOLDEN = (math.sqrt(5) - 1) / 2

Norm = tuple[Tensor, Tensor]


def sample(x: Tensor) -> Tensor:
    """Copy at most 256 positions ``[n, c]``, spread over ``x [*, c]`` with any strides; equal in every run."""
    # Fake tensors must not be kept.
    indices = _sample_indices.__wrapped__ if is_traced() else _sample_indices
    flat, *by_axis = indices(x.shape[:-1], SAMPLE, x.device)
    return x.view(-1, x.shape[-1]).index_select(0, flat) if x.is_contiguous() else x[tuple(by_axis)]


@functools.lru_cache(64)
def _sample_indices(shape: torch.Size, limit: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return at most ``limit`` positions of a tensor whose leading axes have a shape, and their index of each axis."""
    total = math.prod(shape)
    with torch.inference_mode(False):
        steps = torch.arange(min(limit, -(-total // 8)), dtype=torch.float64, device=device).mul_(_GOLDEN)
        flat = steps.frac_().mul_(total).long()
        return flat, *torch.unravel_index(flat, shape)


def mean_of(positions: Tensor) -> Tensor:
    """Return the mean ``[c]`` of the finite values of ``[n, c]``; 0 for channels without any."""
    mean = positions.mean(0)
    # PyTorch's mean without NaN is slow.
    if not is_traced() and bool(mean.isfinite().all()):
        return mean
    return positions.nanmean(0).nan_to_num_(0.0, 0.0, 0.0)


def estimate(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x Wᵀ + b`` for a sample ``x [n, K]``, rounded to bfloat16 if the processor has units for it."""
    if not multiplies_bfloat16():
        return linear(x, weight, bias)
    return onednn_linear(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias).to(x.dtype)


def centered(
    x: Tensor, norm: Norm, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Norm, Tensor | None]:
    """Move the mean of the positions ``x [*, c]``, normalised by ``norm``, from the data of a product into its bias.

    The product's weight is ``[N, c]``, and its bias ``[N]`` or None.

    Returns:
        Scale, shift and bias to use instead; unchanged if products with weights are in their own dtype.
    """
    if reduced(weight) is None:
        return norm, bias
    mean = mean_of(normalize(sample(x).to(weight.dtype), *norm, eps)[0])
    moved = torch.mv(weight, mean)
    return (norm[0], norm[1] - mean), moved if bias is None else bias + moved
