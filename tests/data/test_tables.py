"""Tables are split by the separator that their first line uses most."""

from __future__ import annotations

import pytest

from fastfold.data.tables import table_cells, table_delimiter, table_rows
from fastfold.errors import InputError


@pytest.mark.parametrize(
    ("text", "delimiter"), [("a,b;c,d", ","), ("a;b;c,d", ";"), ("\na\tb", "\t"), ("a", ",")]
)
def test_the_separator_is_the_one_of_most_columns(text: str, delimiter: str) -> None:
    assert table_delimiter(text) == delimiter


def test_rows_have_the_line_where_they_begin() -> None:
    assert table_rows('a,b\n\n"x\ny",1\r\nz,2\n', "t.csv", ",") == [
        (1, ["a", "b"]),
        (3, ["x\ny", "1"]),
        (5, ["z", "2"]),
    ]


def test_ragged_rows_and_open_quotes_are_refused() -> None:
    with pytest.raises(InputError, match=r"t\.csv:4: has 1 columns, the first line names 2"):
        table_cells(["a", "b"], ["x"], path="t.csv", line=4)
    with pytest.raises(InputError, match=r"t\.csv:1: is not a table"):
        table_rows('a,"b\n', "t.csv", ",")
