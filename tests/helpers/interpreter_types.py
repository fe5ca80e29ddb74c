"""Faster types and tensors for Triton's interpreter, with the same results bit for bit.

The interpreter spends most of an operation on the type of the result: it checks and wraps the shape each time.
Here each shape is checked once. ``tests/helpers/interpreter_patches.py`` installs the replacements.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
from typing import Any

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter

_block_type = core.block_type.__init__
_equal_tuples = core.tuple.__eq__
_broadcast = semantic.TritonSemantic.broadcast_impl_value
_convert_float = interpreter._convert_float
_SCALAR_SHAPE, _SCALAR_NUMEL = core.tuple([]), core.constexpr(1)
_BFLOAT16_CASTS = (language.float32, language.bfloat16), (language.bfloat16, language.float32)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Attributes of block types and tensors of one shape."""

    of_type: core.tuple
    numel_of_type: int
    of_tensor: core.tuple
    numel_of_tensor: core.constexpr


_shapes: dict[builtins.tuple[int, ...], _Shape] = {}


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = builtins.tuple([x.value if isinstance(x, core.constexpr) else x for x in shape])
    known = _shapes.get(sizes) if set(map(type, sizes)) == {int} else None
    if known is None:
        _block_type(self, element_ty, shape)
        known = _Shape(
            self.shape,
            self.numel,
            core.tuple([core.constexpr(x) for x in self.shape]),
            core.constexpr(self.numel),
        )
        _shapes[sizes] = known
    self.element_ty = element_ty
    self.shape = known.of_type
    self.numel = known.numel_of_type
    self.known_shape = known


def _with_element_type(self: Any, scalar_ty: Any) -> Any:
    same_shape = object.__new__(core.block_type)
    same_shape.element_ty = scalar_ty
    same_shape.shape = self.shape
    same_shape.numel = self.numel
    same_shape.known_shape = self.known_shape
    return same_shape


def _name_of_block_type(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    if type.is_block():
        self.shape, self.numel = type.known_shape.of_tensor, type.known_shape.numel_of_tensor
    else:
        self.shape, self.numel = _SCALAR_SHAPE, _SCALAR_NUMEL


def _broadcast_other_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
    """Return tensors of one shape as they are, and broadcast others."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _equal_sizes(self: Any, other: Any) -> Any:
    """Compare with a list of integers, which holds no constants of Triton to unwrap; leave the rest to Triton."""
    if type(other) is list and set(map(type, other)) == {int}:
        return core.constexpr(self.values == other)
    return _equal_tuples(self, other)


def _same_object_or(equal: Any) -> Any:
    """Return a comparison that compares only different objects."""

    @functools.wraps(equal)
    def compare(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    return compare


def _convert_bfloat16(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """Convert between float32 and bfloat16 by a shift; the interpreter converts subnormal numbers and other types."""
    if rounding_mode is None and (input_dtype, output_dtype) in _BFLOAT16_CASTS:
        bits = np.ascontiguousarray(input).view(f"u{input.itemsize}")
        wide = bits if bits.itemsize == 4 else bits.astype(np.uint32) << 16
        # Zero minus one wraps around to the largest number, so only subnormal numbers are smaller.
        if not ((wide & 0x7FFFFFFF) - np.uint32(1) < 0x007FFFFF).any():
            return wide if wide is not bits else (wide >> 16).astype(np.uint16)
    return _convert_float(input, input_dtype, output_dtype, rounding_mode)


def install() -> None:
    """Replace the methods in Triton."""
    core.block_type.__init__ = _init_block_type
    core.block_type.with_element_ty = _with_element_type
    core.block_type.name = functools.cached_property(_name_of_block_type)
    core.block_type.name.__set_name__(core.block_type, "name")
    core.tensor.__init__ = _init_tensor
    core.tuple.__eq__ = _equal_sizes
    core.dtype.__eq__ = _same_object_or(core.dtype.__eq__)
    core.pointer_type.__eq__ = _same_object_or(core.pointer_type.__eq__)
    core.block_type.__eq__ = _same_object_or(core.block_type.__eq__)
    semantic.TritonSemantic.broadcast_impl_value = _broadcast_other_shapes
    interpreter._convert_float = _convert_bfloat16
    options = interpreter.interpreter_builder.options
    # Integer sums and products are repeated in 64 bits for an assertion that only debug mode makes.
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
