"""Bounds of settings hold at their edges, and say what they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fastfold.errors import ConfigError
from fastfold.training.bounds import Bounds, bounded, check_bounds, share


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        (Bounds(least=1), (1, 1.5, 10**9), (0, -1, 0.999)),
        (Bounds(above=0), (1e-300, 1), (0, -1e-300)),
        (Bounds(least=0, most=1), (0, 1, 0.5), (-1e-9, 1 + 1e-9)),
        (Bounds(least=0, below=1), (0, 0.999), (1, 1.0)),
    ],
)
def test_numbers(bounds: Bounds, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    for value in (*good, None, "???"):
        bounds.check("group.name", value)
    for value in (*bad, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"^group\.name must be .*, got "):
            bounds.check("group.name", value)


def test_choices() -> None:
    Bounds(choices=("a", "b")).check("x", "b")
    with pytest.raises(ConfigError, match=r"^x must be one of a, b, not 'c'$"):
        Bounds(choices=("a", "b")).check("x", "c")


def test_fields_declare_them() -> None:
    @dataclass
    class Group:
        size: int = bounded(3, least=1)
        part: float = share(0.5)
        free: int = -7

        def __post_init__(self) -> None:
            check_bounds("group", type(self), vars(self))

    assert (Group().size, Group().part, Group().free) == (3, 0.5, -7)
    with pytest.raises(ConfigError, match=r"group\.size must be at least 1, got 0"):
        Group(size=0)
    with pytest.raises(ConfigError, match=r"group\.part must be at least 0 and at most 1, got 2"):
        Group(part=2)
