"""Products and roundings of Triton kernels, the same compiled and in Triton's interpreter."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.common.float32_setting import float32_setting
from fastfold.kernels.common.tuning import TF32X3, LaunchConfig, float32_products

INTERPRETED = tl.constexpr(interpreted())

LOG2E = tl.constexpr(1.4426950408889634)
"""Makes exponentials of powers of two."""


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, start=None):
    """``a [M, K] @ b [K, N]`` in float32, for operands of one dtype, added to ``start [M, N]`` if there is one.

    Triton's interpreter multiplies the bit patterns of bfloat16 as integers, so there they become float32 first:
    the products are the same, since those of bfloat16 are exact in float32.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, start, input_precision=PRECISION)


@triton.jit
def dot_plus(a, b, c, PRECISION: tl.constexpr):
    """``a [M, K] @ b [K, N] + c [M, N]`` in float32, where ``c`` was loaded just now.

    Tensor cores start from it. Others would wait for it, and keep their operands in registers meanwhile, so it is added
    behind; to a sum alone the compiler would give it back as a start.
    """
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return tl.fma(dot(a, b, PRECISION), tl.full(c.shape, 1.0, tl.float32), c)
    else:
        return dot(a, b, PRECISION, c)


@triton.jit
def plus(a, b):
    """``a + b`` in their dtype; in the interpreter, which adds the bit patterns of bfloat16, in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return a + b


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """``x`` in another floating dtype, rounded to the nearest number, ties to even.

    That is what GPUs do. Triton's interpreter cuts bfloat16 off instead, so there the bits are rounded first.
    """
    if INTERPRETED and x.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        b_bits = x.to(tl.uint32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000
        x = b_bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def sigmoid(x):
    """Logistic function in float32, for gates that cost as much as products; 0 where it would be less than 2^-126.

    That of ``triton.language`` takes 11 instructions, most of them for exponentials and quotients that are not normal
    numbers; this one 5. The hardware's tanh would make it 3, with an error of 2^-12, a tenth of a gate of 0.0025.
    """
    if INTERPRETED:
        return tl.sigmoid(x)
    else:
        return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -LOG2E))


def precision(x: Tensor, config: LaunchConfig | None = None) -> str:
    """How products of a tensor's dtype are made: of float32 exactly, unless PyTorch's setting allows tf32.

    Args:
        x: What is multiplied.
        config: Of a kernel that has entries for ``tf32x3``; None where no kernel has.
    """
    if x.dtype != torch.float32:
        return "ieee"
    if float32_setting() != "highest":
        return "tf32"
    return "ieee" if config is None else config.float32


def products_suffix(x: Tensor) -> str:
    """Ending of a key of the table of configurations: ``_tf32x3`` where products may be made so, else none."""
    exact = x.dtype == torch.float32 and float32_setting() == "highest"
    return f"_{TF32X3}" if exact and float32_products(x.device) == TF32X3 else ""


@triton.jit
def row_offset(o_row, size_1, size_2, strides, AXES: tl.constexpr):
    """Offsets of the first channels of rows, in int64: a pair tensor passes 2^31 elements at 4,096 residues.

    Sizes and strides are those of :class:`~fastfold.kernels.common.layout.Rows`. Two sizes rather than a tuple, because
    ``do_not_specialize`` has no effect on what is in one.
    """
    o_row = o_row.to(tl.int64)
    if AXES == 1:
        return o_row * strides[2]
    o_outer = o_row // size_2
    o_inner = o_row % size_2
    if AXES == 2:
        return o_outer * strides[1] + o_inner * strides[2]
    return (o_outer // size_1) * strides[0] + (o_outer % size_1) * strides[1] + o_inner * strides[2]


@triton.jit
def pair_tile(p_x, strides, o_i, o_j, o_c):
    """Pointers ``[BM, BC]`` to channels of positions ``o_i``, ``o_j [BM]`` of ``x [I, J, C]``."""
    return p_x + (o_i * strides[0] + o_j * strides[1])[:, None] + o_c[None, :] * strides[2]
