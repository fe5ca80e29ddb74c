"""CIF's grammar: rows over several lines, quotes, texts, and damage named with its line."""

from __future__ import annotations

import pytest

from fastfold.errors import InputError
from fastfold.protein.io.cif_tables import CifTable, read_cif_tables

TABLES = """\
data_X
_entry.id 'an entry'
loop_
_atom.id
_atom.Name
1 "C'" # comment
2
;text over
two lines
;
3 'it''s' 4 .
loop_
_other.id
1 2 3
#
data_Y
_entry.id second
"""


def read(text: str) -> dict[str, CifTable]:
    return read_cif_tables(text.splitlines(), ("_entry", "_atom"), path="x.cif")


def test_values_are_what_was_written_however_it_was_quoted() -> None:
    tables = read(TABLES)
    assert tables.keys() == {"_entry", "_atom"}  # asked for, and of the first block
    assert tables["_entry"].column("id") == ["an entry"]
    assert tables["_atom"].column("name") == ["C'", "text over\ntwo lines", "it''s", ""]
    assert tables["_atom"].column("absent") == [""] * 4
    assert tables["_atom"].lines == [6, 7, 11, 11]
    assert tables["_atom"].closed


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("data_X\nloop_\n_atom.id\n_atom.name\n1 C\n2\n", 6, "do not have 2 values each from here on"),
        ("data_X\n_entry.id\n;text\n", 3, "the file stops within the text"),
        ("data_X\n_entry.id 'open\n", 2, "a quote that is not closed"),
        ("data_X\n_entry.id\n", 2, "_entry.id has no value"),
        ("data_X\nloop_\n1 2\n", 2, "a loop_ that is not followed by names"),
        ("data_X\n_entry.id a\n_entry.id b\n", 3, "is given twice"),
        ("data_X\nstray\n", 2, "a value where a name is expected"),
    ],
)
def test_damage_is_named_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(text)
    assert caught.value.line == line


def test_a_table_that_nothing_follows_may_be_cut_off() -> None:
    assert not read("data_X\nloop_\n_atom.id\n1\n2\n")["_atom"].closed
