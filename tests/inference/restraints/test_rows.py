"""Rows of restraint files have the line that they came from, whatever separates their cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.inference.restraints.rows import limited, read_number, read_share, refuse_lines, split_rows

PATH = Path("links.csv")


@pytest.mark.parametrize(
    ("text", "line"), [("a,b\n# why\n\n1, 2\n", 4), ("a\tb\n1\t2\n", 2), ("a;b\n1;2", 2), ("a b\n1  2", 2)]
)
def test_cells_are_split_and_lines_counted(text: str, line: int) -> None:
    head, row = split_rows(PATH, text)
    assert (head.place, head.cells) == ("line 1", ["a", "b"])
    assert (row.place, row.cells) == (f"line {line}", ["1", "2"])


def test_a_quote_that_does_not_end_is_named() -> None:
    with pytest.raises(InputError, match=r"is not a table: .*; check the quotes"):
        split_rows(PATH, 'a,b\n"1,2\n')


def test_numbers_are_from_zero_and_shares_up_to_one() -> None:
    assert read_number({"max": ""}, "max", 8.0) == 8.0
    assert read_number({"max": "7.5"}, "max", 8.0) == 7.5
    assert read_share({}, "weight", 1.0) == 1.0
    for text in ("-1", "nan", "inf", "x", "1_0", "\u0661\u0660"):
        with pytest.raises(ValueError, match="max: expected a number"):
            read_number({"max": text}, "max", 8.0)
    with pytest.raises(ValueError, match=r"weight: expected a number from 0 to 1, found 1\.5"):
        read_share({"weight": "1.5"}, "weight", 1.0)


def test_a_residue_is_not_restrained_to_itself() -> None:
    (one,) = limited([(3, 9)], 0.0, 8.0, atoms="CA")
    assert (one.first, one.second, one.low, one.high) == (3, 9, 0.0, 8.0)
    with pytest.raises(ValueError, match="restrains a residue to itself"):
        limited([(3, 3)], 0.0, 8.0, atoms="CA")


def test_twenty_lines_are_named_and_others_counted() -> None:
    refuse_lines(PATH, "has bad rows", [])
    with pytest.raises(InputError, match=r"(?s)has bad rows:\nline 0\n.*line 19\n\.\.\. and 3 more"):
        refuse_lines(PATH, "has bad rows", [f"line {number}" for number in range(23)])


@pytest.mark.parametrize("number", [0, 1, 19, 20, 21, 25])
def test_at_most_twenty_lines_are_named(number: int) -> None:
    errors = [f"line {i}: wrong" for i in range(number)]
    if not errors:
        refuse_lines(Path("links.csv"), "has a problem", errors)
        return
    with pytest.raises(InputError) as error:
        refuse_lines(Path("links.csv"), "has a problem", errors)
    more = [f"... and {number - 20} more"] if number > 20 else []
    assert str(error.value).splitlines() == ["links.csv: has a problem:", *errors[:20], *more]
