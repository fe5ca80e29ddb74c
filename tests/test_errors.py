"""A wrong name gets the nearest known one, or another remedy."""

from __future__ import annotations

import pytest

from fastfold.errors import suggest

KNOWN = ("num_recycles", "num_relax", "seeds")


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("num_recycels", {}, "did you mean num_recycles?"),
        ("xyz", {}, "check the spelling"),
        ("xyz", {"otherwise": "the names are a, b"}, "the names are a, b"),
        ("num_recycels", {"cutoff": 0.99}, "check the spelling"),
        ("num_recycels", {"meant": "seeds"}, "did you mean seeds?"),
    ],
)
def test_a_wrong_name_gets_a_remedy(name: str, settings: dict[str, str], expected: str) -> None:
    assert suggest(name, KNOWN, **settings) == expected  # type: ignore[arg-type]
