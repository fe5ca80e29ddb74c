"""Tables of queries: columns, quotes, alignments, and what is refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.queries.formats import parse_table
from fastfold.data.queries.read import read_targets
from fastfold.data.queries.records import QueryFile, targets_of_records
from fastfold.data.targets import Target
from fastfold.errors import InputError


def parse(text: str, *, complex_: bool = False) -> tuple[list[Target], list[InputError]]:
    """Targets and errors of a table."""
    errors: list[InputError] = []
    file = QueryFile("in.csv", text.encode())
    found = targets_of_records(parse_table(file), file, errors, complex_=complex_)
    return [one.target for one in found], errors


def test_columns_are_found_by_name() -> None:
    """In any order and case, with others between them; quotes hold separators and line ends."""
    text = 'Sequence,note,ID\nmk:MV,"a, b",one\n"M\nKV",,"two, too"\n\n , ,\nMK,,\n'
    (one, two, three), errors = parse(text)
    assert not errors
    assert (one.record, [chain.sequence for chain in one.chains]) == ("one", ["MK", "MV"])
    assert (two.record, two.name, two.chains[0].sequence) == ("two, too", "two_too", "MKV")
    assert (three.record, three.warnings) == ("in_3", ("line 7 lacks an id; it is named 'in_3'",))


def test_tabs_separate_too() -> None:
    """A TSV is the same table."""
    (target,), errors = parse("id\tsequence\nx\tMKV\n")
    assert (target.record, errors) == ("x", [])


def test_rows_are_one_complex_if_asked() -> None:
    """Called after the file, its chains after their rows."""
    (target,), errors = parse("id,sequence\na,MK\nb,MV\n", complex_=True)
    assert not errors
    assert (target.record, [chain.record for chain in target.chains]) == ("in", ["a", "b"])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "must name the columns"),
        ("name,sequence\na,MK\n", 1, "must name the columns"),
        ("id,id,sequence\na,b,MK\n", 1, "each once"),
        ("id,sequence\n", None, "contains no row after"),
        (
            "id,sequence,msa\na,MK,x.a3m.gz\ngood,MK,\n",
            2,
            "'msa' names an alignment, which only 'a3mpath' does",
        ),
        ("id,sequence\na\n", 2, "has 1 columns, the first line names 2"),
        ("id,sequence\na,b,MK\n", 2, "has 3 columns"),
        ("id,sequence\na,\ngood,MK\n", 2, "lacks a sequence; write its residues"),
        ("id,sequence\ngood,MK\nb,M1\n", 3, "remove the position numbers"),
        ('id,sequence\na,MK\nb,"MK\n', 3, "is not a table"),
    ],
)
def test_bad_tables_are_refused_by_line(text: str, line: int | None, message: str) -> None:
    """A bad row leaves the others alone."""
    try:
        targets, (error,) = parse(text)
    except InputError as whole:
        error = whole
    else:
        assert [target.record for target in targets] == (["good"] if "good" in text else [])
    assert message in str(error)
    assert (error.path, error.line) == ("in.csv", line)


def test_alignments_count_from_the_tables_folder(tmp_path: Path) -> None:
    """An alignment of other chains, or none at all, spoils its own row only."""
    (tmp_path / "good.a3m").write_text(">q\nMKV\n>h\nMRV\n")
    table = tmp_path / "t.csv"
    table.write_text("id,sequence,a3mpath\na,mkv,good.a3m\nb,MKK,good.a3m\nc,MK,none.a3m\nd,MK,\n")
    (first, last), errors = read_targets([table])
    assert [first.record, last.record] == ["a", "d"]
    assert first.alignments is not None
    assert first.alignments[0][0][0].sequences == ("MKV", "MRV")
    assert last.alignments is None
    assert ["differ from those of" in str(errors[0]), "no such file" in str(errors[1])] == [True, True]
    table.write_text("id,sequence,a3mpath\na,mkv,\nb,mkv,good.a3m\n")
    targets, (error,) = read_targets([table], complex_=True)
    assert (targets, error.line) == ([], 3)
    assert "remove its a3mpath, or RunOptions.complex_" in str(error)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_is_that_of_the_first_line(separator: str) -> None:
    """Spreadsheets of many countries write ';' into files called .csv."""
    text = f'id{separator}sequence\none{separator}MK:MV\n"two, 2"{separator}MKV\n'
    found, errors = parse(text)
    assert not errors
    assert [target.record for target in found] == ["one", "two, 2"]
    assert [chain.sequence for chain in found[0].chains] == ["MK", "MV"]
