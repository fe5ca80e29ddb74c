"""Lengths of time and amounts of memory as people write them."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError
from fastfold.utils.units import parse_bytes, parse_duration, parse_number


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


@pytest.mark.parametrize("text", ["24", "1", "1048575"])
def test_a_budget_of_a_few_bytes_lacks_its_unit(text: str):
    with pytest.raises(ConfigError, match=f"write the unit, for example {text}GiB"):
        parse_bytes(text)
    assert parse_bytes(f"{text} B") == int(text)


def test_amounts_without_a_unit_are_bytes():
    assert (parse_bytes("1048576"), parse_bytes(24), parse_bytes("0", none=True)) == (2**20, 24, 0)


@pytest.mark.parametrize(
    ("text", "amount"), [("20GiB", 20 * 2**30), ("512 MB", 512 * 10**6), ("1.5g", 3 * 2**29), ("2kib", 2048)]
)
def test_units_are_powers_of_1024_or_1000(text: str, amount: int):
    assert parse_bytes(text) == amount


def test_numbers_are_read_and_other_texts_refused():
    assert (parse_number("1e-4"), parse_number(" -3 ")) == (1e-4, -3.0)
    with pytest.raises(ConfigError, match="'1_0' is not a number"):
        parse_number("1_0")
