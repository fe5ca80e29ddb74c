"""Lengths of time as people write them."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError
from fastfold.utils.units import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        (" 2 H ", 7200),
        ("2d", 172800),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("100:00:00", 360000),
    ],
)
def test_lengths_of_time_are_read(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", "0:00", "1:2", "1:2:3:4", "5 weeks", "1e3", "nan"])
def test_what_is_no_length_of_time_is_refused(text: str):
    with pytest.raises(ConfigError, match="write for example"):
        parse_duration(text)
