"""Products of float32 on tensor cores, as arithmetic on a CPU: what Triton's interpreter makes exactly is rounded.

A tensor core multiplies exactly, and adds up a few products at a time: each is cut off below the lowest bits that the
largest of them can keep, and so is the sum (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor
cores", PeerJ Computer Science 7:e330, 2021). One extra bit is assumed here, where they found two and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]
AT_ONCE = 8
"""Products that are added up at a time."""

_SIGNIFICANT = {"tf32": 13, "bf16": 16}
"""Bits of a float32 that the formats lack."""


def rounded(x: Array, kind: str) -> Array:
    """``x`` in TF32 or bfloat16, to the nearest, as float32; ties of TF32 go away from zero, of bfloat16 to even."""
    lacking = _SIGNIFICANT[kind]
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32(1 << (lacking - 1))
    if kind == "bf16":
        half = half - np.uint32(1) + ((bits >> lacking) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFFFFFF << lacking & 0xFFFFFFFF)).view(np.float32)


def _cut(x: Array, kind: str) -> Array:
    """``x`` as the tensor core reads it: without the bits that the format lacks."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFFFFF << _SIGNIFICANT[kind] & 0xFFFFFFFF)).view(np.float32)


def _toward_zero(x: Array) -> Array:
    """Float64 as float32, cut off."""
    near = x.astype(np.float32)
    past = np.abs(near.astype(np.float64)) > np.abs(x)
    return np.where(past, np.nextafter(near, np.float32(0)), near)


def core_product(a: Array, b: Array, start: Array) -> Array:
    """``a [M, K] @ b [K, N] + start [M, N]``, float32 each, as a tensor core adds up."""
    total = start.astype(np.float32)
    for k in range(0, a.shape[1], AT_ONCE):
        left, right = (x.astype(np.float64) for x in (a[:, k : k + AT_ONCE], b[k : k + AT_ONCE]))
        terms = np.concatenate([left[:, :, None] * right[None], total.astype(np.float64)[:, None]], 1)
        largest = np.abs(terms).max(1, keepdims=True)
        # A float32 as large as the largest keeps bits down to 2^-23 of its leading one; one more is kept here.
        unit = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 24)
        total = _toward_zero((np.trunc(terms / unit) * unit).sum(1))
    return total


def split_product(a: Array, b: Array, start: Array, kind: str) -> Array:
    """``a @ b + start`` by ``tf32x3`` or ``bf16x3``: products of each factor's two parts but for the smallest of four.

    As Triton compiles it: the mixed products first, without what is no number (the small part of an infinity), the
    large one on top of them, and ``start`` added behind.
    """
    kind = kind.removesuffix("x3")
    large_a, large_b = rounded(a, kind), rounded(b, kind)
    with np.errstate(invalid="ignore"):
        small_a, small_b = _cut(a - large_a, kind), _cut(b - large_b, kind)
        mixed = core_product(small_a, large_b, np.zeros_like(start))
        mixed = core_product(large_a, small_b, mixed)
        mixed = np.where(np.isnan(mixed), np.float32(0), mixed)
        return core_product(large_a, large_b, mixed) + start


def fused_product(a: Array, b: Array, start: Array) -> Array:
    """``a @ b + start`` by fused multiply-adds of float32, one after another."""
    total = start.astype(np.float32)
    for k in range(a.shape[1]):
        total = (a[:, k : k + 1].astype(np.float64) * b[k : k + 1] + total).astype(np.float32)
    return total


@contextmanager
def products_made_by(products: Mapping[str, Callable[[Array, Array, Array], Array]]) -> Iterator[list[str]]:
    """Inside, Triton's interpreter makes all products of matrices so.

    Args:
        products: Of ``a``, ``b`` and ``start``, as :func:`fused_product`, by what a kernel asks for: ``IEEE``, ``TF32``
            or ``TF32x3``.

    Yields:
        A list that grows by what each product asks for.

    Raises:
        KeyError: In a kernel that asks for something else.
    """
    asked: list[str] = []

    def dot(a: Any, b: Any, d: Any, precision: Any, *options: Any) -> Any:
        asked.append(precision.name)
        return interpreter.TensorHandle(products[precision.name](a.data, b.data, d.data), d.dtype.scalar)

    with mock.patch.object(interpreter.interpreter_builder, "create_dot", dot):
        yield asked
