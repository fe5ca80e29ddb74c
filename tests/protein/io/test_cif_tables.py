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


def read(text: str) -> list[dict[str, CifTable]]:
    return read_cif_tables(text.splitlines(), ("_entry", "_atom"), path="x.cif")


def test_values_are_what_was_written_however_it_was_quoted() -> None:
    tables, second = read(TABLES)
    assert tables.keys() == {"_entry", "_atom"}
    assert tables["_entry"].column("id") == ["an entry"]
    assert tables["_atom"].column("name") == ["C'", "text over\ntwo lines", "it''s", ""]
    assert tables["_atom"].column("absent") == [""] * 4
    assert second["_entry"].column("id") == ["second"]


def test_rows_know_their_lines() -> None:
    """Comments, texts over several lines and two rows in one line included."""
    table = read(TABLES)[0]["_atom"]
    assert [table.line(row) for row in range(table.size)] == [6, 7, 11, 11]


def test_twins_that_no_one_asked_for_are_no_damage() -> None:
    """Two blocks of one name, and an item twice in another category."""
    first, second = read("data_X\n_entry.id a\n_x.y 1\n_x.y 2\ndata_X\n_entry.id b\n")
    assert (first["_entry"].column("id"), second["_entry"].column("id")) == (["a"], ["b"])


def test_names_of_blocks_may_have_blanks() -> None:
    """Biopython writes a structure's id as it is; items in the same line stay items."""
    for name in ("data_my protein 2 ", "DATA_ x", "data_x _other.id 1"):
        (tables,) = read(f"{name}\n_entry.id a\n")
        assert tables["_entry"].column("id") == ["a"]
    assert read("data_x _entry.id a\n")[0]["_entry"].column("id") == ["a"]


def test_letters_beyond_ascii_keep_names_apart() -> None:
    """Outside quotes too, where CIF has none: chains Ä and Ö are two."""
    (tables,) = read("data_X\nloop_\n_atom.id\nÄ\nÖ\n'Å'\n")
    assert len(set(tables["_atom"].column("id"))) == 3


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("data_X\nloop_\n_atom.id\n_atom.name\n1 C\n2\n", 6, "expected 2 values in each row of _atom"),
        (
            "data_X\nloop_\n_no.id # a_b\n_no.name\n1 'C D' 2 E\n3\n4 F",
            6,
            "expected 2 values in each row of _no",
        ),
        ("data_X\n_entry.id\n;text\n", 3, "unterminated text field"),
        ("data_X\n_entry.id 'open\n", 2, "unterminated 'string'"),
        ("data_X\n_entry.id\n", 2, "unexpected '_entry.id'"),
        ("data_X\nloop_\n1 2\n", 3, "unexpected '1 2'"),
        ("data_X\n_entry.id a\n_entry.id b\n", 3, "_entry.id is given twice"),
        ("data_X\nloop_\n_atom.id\n1\nloop_\n_atom.name\nC\n", 5, "_atom.name is given twice"),
        ("data_X\nloop_\n_atom.id\nloop_\n_atom.id\n1\n", 4, "_atom.id is given twice"),
        ("data_X\n_entry.id\n_entry.title x\n", 2, "expected a value of _entry.id"),
        ("data_X\nstray\n", 2, "unexpected 'stray'"),
        ("data_X\nloop_\n_atom.id\n_entry.id\n1 2\n", None, "_entry.id in loop with _atom"),
    ],
)
def test_damage_is_named_with_its_line(text: str, line: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(text)
    assert caught.value.line == line
    assert any(help in str(caught.value) for help in ("Download or copy it again", "remove one", "add one"))
