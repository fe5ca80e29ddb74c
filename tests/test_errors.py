"""A wrong name gets the nearest known one, and a message names settings as its reader writes them."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError, as_option, settings_spelled, spelled, suggest

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


@pytest.mark.parametrize(
    ("text", "argument", "option"),
    [
        ("leave out `num_recycles`", "leave out num_recycles=", "leave out --num-recycles"),
        ("use `precision=bf16`", "use precision='bf16'", "use --precision bf16"),
        ("use `num_recycles=3`", "use num_recycles=3", "use --num-recycles 3"),
        ("give `out=DIR`", "give out=DIR", "give --out DIR"),
        ("use `overwrite=True`", "use overwrite=True", "use --overwrite"),
        ("a `quote", "a `quote", "a `quote"),
    ],
)
def test_a_setting_is_spelled_for_its_reader(text: str, argument: str, option: str) -> None:
    error = ConfigError(text)
    assert str(error) == spelled(text) == argument
    with settings_spelled(as_option):
        assert str(error) == spelled(text) == option
    assert str(error) == argument
