"""Check names, shapes and values of features."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastfold.errors import InputError

Layout = Mapping[str, tuple[int | str, ...]]
"""Feature names and their shapes; sizes with the same letter must be equal in all features."""


def check_layout(features: Mapping[str, np.ndarray], layout: Layout, **sizes: int) -> dict[str, int]:
    """Check presence and shapes of features, and return the size of each letter of the layout.

    Some sizes are known by letter.

    Raises:
        InputError: A feature is missing, empty, or has another shape.
    """
    for name, shape in layout.items():
        if name not in features:
            raise InputError(f"feature {name!r} is missing; expected {', '.join(layout)}")
        found = np.shape(features[name])
        if len(found) == len(shape):
            for letter, size in zip(shape, found, strict=True):
                if isinstance(letter, str):
                    sizes.setdefault(letter, size)
        wanted = tuple(sizes.get(size, -1) if isinstance(size, str) else size for size in shape)
        if found != wanted:
            named = ", ".join(
                f"{size} = {sizes[size]}" if size in sizes else str(size) for size in map(str, shape)
            )
            raise InputError(f"feature {name!r} has shape {list(found)}, expected [{named}]")
        if 0 in found:
            raise InputError(f"feature {name!r} is empty: its shape is {list(found)}")
    return sizes


def check_ids(features: Mapping[str, np.ndarray], name: str, classes: int) -> None:
    """Check that a feature of integers is within ``range(classes)``.

    Raises:
        InputError: A value is outside of the range.
    """
    values = np.asarray(features[name])
    if values.size and (values.min() < 0 or values.max() >= classes):
        raise InputError(
            f"feature {name!r} has values from {values.min()} to {values.max()}, expected 0 to {classes - 1}"
        )
