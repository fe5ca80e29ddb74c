"""Products and roundings of Triton kernels; results are the same compiled and in Triton's interpreter."""

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


def compiles_assembly(version: str) -> bool:
    """Return True if a version of Triton, such as ``3.9.0``, compiles loops with inline assembly, for NVIDIA's GPUs."""
    # Before 3.9, some loops with it do not compile, and others keep thousands of bytes of registers in memory.
    major, minor = map(int, version.split(".")[:2])
    return (major, minor) >= (3, 9) and torch.version.hip is None


NO_PTX = tl.constexpr(interpreted() or not compiles_assembly(triton.__version__))
"""True where kernels must do without NVIDIA's assembly."""

LOG2E = tl.constexpr(1.4426950408889634)  #: Factor that turns an exponent of e into an exponent of 2


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, start=None):
    """Compute ``a [M, K] @ b [K, N]`` in float32, plus ``start [M, N]`` if given; operands share a dtype."""
    # Triton's interpreter multiplies the bit patterns of bfloat16 as integers. There the operands become float32
    # first; results are equal, because products of bfloat16 are exact in float32.
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, start, input_precision=PRECISION)


@triton.jit
def dot_plus(a, b, c, PRECISION: tl.constexpr):
    """Compute ``a [M, K] @ b [K, N] + c [M, N]`` in float32, for a freshly loaded ``c``."""
    # Tensor cores start from ``c``. Products without tensor cores would wait for it and hold their operands in
    # registers meanwhile. There ``c`` is added after the product, by ``fma``: the compiler would turn a plain sum
    # back into a start value.
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return tl.fma(dot(a, b, PRECISION), tl.full(c.shape, 1.0, tl.float32), c)
    else:
        return dot(a, b, PRECISION, c)


@triton.jit
def plus(a, b):
    """Compute ``a + b`` in their dtype."""
    # Triton's interpreter adds the bit patterns of bfloat16. There the sum is float32.
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return a + b


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Convert ``x`` to another floating dtype, rounded to nearest, ties to even."""
    # GPUs round this way. Triton's interpreter truncates to bfloat16, so there the bits are rounded first.
    if INTERPRETED and x.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        b_bits = x.to(tl.uint32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000
        x = b_bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def sigmoid(x):
    """Compute the logistic function in float32, by few instructions; results below 2^-126 become 0."""
    # ``triton.language.sigmoid`` handles subnormal numbers in exponentials and quotients, which costs most of its
    # instructions. The hardware's tanh would be shorter still, but its error is 2^-12.
    if INTERPRETED:
        return tl.sigmoid(x)
    else:
        return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -LOG2E))


def precision(x: Tensor, config: LaunchConfig | None = None) -> str:
    """Return the ``input_precision`` of products: exact for float32, unless PyTorch's setting allows tf32.

    A kernel with entries for ``tf32x3`` gives its configuration. ``x`` is an operand of the products.
    """
    if x.dtype != torch.float32:
        return "ieee"
    if float32_setting() != "highest":
        return "tf32"
    return "ieee" if config is None else config.float32


def products_suffix(x: Tensor) -> str:
    """Return the end of a configuration's key: ``_tf32x3`` if products of ``x`` may be made in that way."""
    exact = x.dtype == torch.float32 and float32_setting() == "highest"
    return f"_{TF32X3}" if exact and float32_products(x.device) == TF32X3 else ""


@triton.jit
def row_offset(o_row, size_1, size_2, strides, AXES: tl.constexpr):
    """Compute offsets of the first channels of rows, in int64.

    A pair tensor passes 2^31 elements at 4,096 residues. Sizes and strides are those of
    :class:`~fastfold.kernels.common.layout.Rows`. Both sizes are separate arguments, because ``do_not_specialize`` has
    no effect on elements of a tuple.
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
    """Compute pointers ``[BM, BC]`` to channels ``o_c`` of positions ``o_i``, ``o_j [BM]`` of ``x [I, J, C]``."""
    return p_x + (o_i * strides[0] + o_j * strides[1])[:, None] + o_c[None, :] * strides[2]


@triton.jit
def load_again(p_x, mask):
    """Load a tile a second time, zero outside of the mask, so that no register keeps it meanwhile."""
    # The compiler merges equal loads; one with another eviction policy is not equal.
    return tl.load(p_x, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def index_again(i, AGAIN: tl.constexpr = True):
    """Return the int32 ``i`` as a new number, so that values made of it need no registers before."""
    # The compiler merges equal expressions, and moves constant ones out of loops, but not the results of assembly.
    # Without AGAIN it may.
    if NO_PTX or not AGAIN:
        return i
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], tl.int32, is_pure=False, pack=1)


@triton.jit
def channels_again(C, BC: tl.constexpr, AGAIN: tl.constexpr = True):
    """Return the offsets ``[BC]`` of channels, and the mask of those below C; see :func:`index_again`."""
    o_c = tl.arange(0, BC)
    if AGAIN and not NO_PTX:
        o_c += tl.multiple_of(index_again(0), BC)
    return o_c, o_c < C
