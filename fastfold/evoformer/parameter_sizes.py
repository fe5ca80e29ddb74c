"""Sizes read off the shapes of official parameters, as far as they make sense."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fastfold.evoformer.alphafold_names import numbered

Shape = tuple[int, ...]

# Larger numbers cannot be meant; they are left for the comparison with the network's shapes to refuse.
LARGEST_SIZE = 2**16
MOST_BLOCKS = 512


class Sizes:
    """Sizes read off shapes, None wherever there is nothing sensible to read.

    Args:
        shapes: Shapes by official key.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes

    def axis(self, key: str, axis: int, *, most: int = LARGEST_SIZE) -> int | None:
        """Size of one axis of a parameter."""
        shape = self.shapes.get(key, ())
        if not -len(shape) <= axis < len(shape):
            return None
        return shape[axis] if 0 < shape[axis] <= most else None

    def output(self, key: str, *, leading: int) -> int | None:
        """Channels behind the ``leading`` axes, heads included, however they are split."""
        shape = self.shapes.get(key, ())[leading:]
        size = prod(shape) if shape else 0
        return size if 0 < size <= LARGEST_SIZE else None

    def ratio(self, key: str, axis: int, over: int) -> int | None:
        """Quotient of two axes of one parameter, if it is whole."""
        return divide(self.axis(key, axis), self.axis(key, over))

    def count(self, scope: str, name: str) -> int | None:
        """How many modules ``name``, ``name_1``, … there are in a scope."""
        found = 0
        while f"{scope}/{numbered(name, found)}//weights" in self.shapes:
            found += 1
        return found or None

    def has(self, key: str) -> bool:
        """Whether there is such a parameter."""
        return key in self.shapes


def divide(a: int | None, b: int | None) -> int | None:
    """Quotient of two sizes if both are there and it is whole."""
    return a // b if a and b and a % b == 0 else None


def set_found(node: Any, **values: int | None) -> None:
    """Put what was found into a config node; what was not stays."""
    for name, value in values.items():
        if value is not None:
            node[name] = value


def half(size: int) -> int | None:
    """Half of an even size."""
    return size // 2 if size % 2 == 0 else None
