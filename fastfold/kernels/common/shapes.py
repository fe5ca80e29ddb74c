"""Checks of an operator's shapes, because kernels read and write memory outside of tensors that do not match.

Operators of a fold have few shapes and many calls, so they check equal shapes once, by ``functools.lru_cache``. Where
shapes may be symbols, which cannot be hashed, they call the function behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fastfold.errors import InputError

Shape = tuple[int, ...]


def axes_of(operator: str, name: str, shape: Shape, layout: str, dtype: torch.dtype = torch.float32) -> Shape:
    """Return the shape of an argument that has at least the axes of a ``layout`` such as ``R, N, c``.

    Raises:
        InputError: There are fewer axes, or the numbers are not floating.
    """
    if not dtype.is_floating_point:
        raise InputError(f"{operator}: expected {name} of a floating dtype, found {dtype}")
    if len(shape) <= layout.count(","):
        raise InputError(f"{operator}: expected {name} [*, {layout}], found {list(shape)}")
    return shape


def check_shapes(
    operator: str, name: str, shape: Shape, others: Iterable[tuple[str, Shape | None, Shape]]
) -> None:
    """Check shapes that follow from that of the argument ``name``; each has its name, and is None if it is not given.

    Raises:
        InputError: A shape differs from the one that comes after it.
    """
    for other, own, wanted in others:
        if own is not None and own != wanted:
            raise InputError(
                f"{operator}: expected {other} {list(wanted)} for {name} {list(shape)}, found {list(own)}"
            )
