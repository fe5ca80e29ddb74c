"""YAML, JSON and tables of users: plain values alone, one error of our own for everything else."""

from __future__ import annotations

import ast
import gzip
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.utils.foreign_text import (
    MAX_YAML_BYTES,
    json_object_or_none,
    package_json,
    parse_json,
    parse_yaml,
    plain_float,
    plain_int,
    read_json_object,
    read_settings_text,
    shown,
    table_cells,
    table_delimiter,
    table_rows,
)
from tests.helpers.syntax_trees import package_trees


@pytest.mark.parametrize(
    ("text", "delimiter"), [("a,b;c,d", ","), ("a;b;c,d", ";"), ("\na\tb", "\t"), ("a", ",")]
)
def test_the_separator_is_the_one_of_most_columns(text: str, delimiter: str) -> None:
    assert table_delimiter(text) == delimiter


def test_numbers_are_those_of_other_programs_too() -> None:
    assert (plain_float(" -1.5e3 "), plain_int(" -12 ")) == (-1500.0, -12)
    for text in ("1_0", "\u0661", "", "x"):
        with pytest.raises(ValueError, match=r"expected a number|could not convert"):
            plain_float(text)
        with pytest.raises(ValueError, match=r"expected a whole number|invalid literal"):
            plain_int(text)


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


def test_comments_are_left_out_and_lines_counted() -> None:
    assert table_rows('# a,b\nx,"1\n2"\n  # c\ny,3', "t.csv", ",", comment="#") == [
        (2, ["x", "1\n2"]),
        (5, ["y", "3"]),
    ]


def test_a_table_is_read_packed_or_not(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('\ufeff{"1abc": [1, "é"]}', encoding="utf-8")
    (tmp_path / "table.json.gz").write_bytes(gzip.compress(b'{"1abc": {}}'))
    assert read_json_object(tmp_path / "table.json", "ids to numbers", limit=100) == {"1abc": [1, "é"]}
    assert read_json_object(tmp_path / "table.json.gz", "ids to numbers", limit=100) == {"1abc": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n\n "b" 2}', r":3: is not valid JSON \(Expecting ':' delimiter\); make it again"),
        (b'{"a": "\xe9"}', "is not text in UTF-8; make it again"),
        (b"[1, 2]", "must map ids to numbers; make it again"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"a": "' + b"x" * 200_000 + b'"}', "is larger than 150,000 bytes"),
    ],
)
def test_anything_else_is_one_clear_error(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json_object(tmp_path / "table.json", "ids to numbers", limit=150_000)


def test_what_holds_no_object_is_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert json_object_or_none(path) is None
    assert json_object_or_none(tmp_path) is None
    for content in (b'{"a": 1', b"[1]", b"\xff", b'{"a": ' + b"[" * 100_000):
        path.write_bytes(content)
        assert json_object_or_none(path) is None, content[:9]
    path.write_bytes(b"{}")
    assert json_object_or_none(path) == {}
    assert [json_object_or_none(text) for text in ('{"a": 1}', b'{"a": 1', "7", "[" * 100_000)] == [
        {"a": 1},
        None,
        None,
        None,
    ]


def test_a_file_of_the_package_is_read() -> None:
    assert set(package_json("fastfold.protein", "residue_constants.json")) >= {"residues"}


@pytest.mark.parametrize("ending", ["", "\n"])
def test_values_of_yaml_are_plain(ending: str) -> None:
    """As YAML 1.2 reads them, with yes and no; PyYAML would make dates, and numbers of base 8 and 60."""
    text = "{a: [1, -2.5, 1e-4, 010, 0x1f], b: [2001-99-99, 1:30, yes, no, ~, null], <<: {c: .inf}, =: '1'}"
    assert parse_yaml(text + ending, "f.yaml") == {
        "a": [1, -2.5, 1e-4, 10, "0x1f"],
        "b": ["2001-99-99", "1:30", True, False, None, None],
        "<<": {"c": float("inf")},
        "=": "1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", r"f\.yaml:2: is not plain YAML: an alias \(\*x\)"),
        ("a: !!int x", r"f\.yaml:1: is not plain YAML: a tag \(tag:yaml\.org,2002:int\)"),
        ("a:\n- !!python/object:os.system x", r"f\.yaml:2: is not plain YAML: a tag"),
        ("a: 1\nb: 2\na: 3", r"f\.yaml:3: is not plain YAML: the key 'a' again"),
        ("a: [", r"f\.yaml:1: is not plain YAML: expected the node content"),
        ("--- 1\n--- 2", r"f\.yaml:2: .*expected a single document in the stream, but found another"),
        ("? [1]\n: 2", r"f\.yaml:1: is not plain YAML: found unhashable key"),
        ("a: \x01", "it has the character #x0001"),
        ("[" * 3000, "is nested too deeply"),
        ("1" * 5000, "has a number that is too long"),
        (b"\xff", "is not text in UTF-8"),
        (" " * (MAX_YAML_BYTES + 1), "is larger than 4,194,304 bytes"),
    ],
)
def test_other_yaml_is_refused_by_its_line(text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_yaml(text, "f.yaml")


def test_a_repeated_key_of_json_is_refused() -> None:
    """Python keeps the last value."""
    with pytest.raises(InputError, match=r"f\.json: has the key 'a' twice in an object; check"):
        parse_json('{"b": [{"a": 1, "c": 2, "a": 3}]}', "f.json")
    with pytest.raises(InputError, match="has a number that is too long; make it again"):
        parse_json("[" + "1" * 5000 + "]", "f.json", remedy="make it again")


def test_settings_are_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(InputError, match="is not a regular file"):
            read_settings_text(path, limit=100)
    (tmp_path / "a.yaml").write_text("\ufeffa: 1")
    assert read_settings_text(tmp_path / "a.yaml", limit=100) == "a: 1"
    with pytest.raises(InputError, match="is larger than 3 bytes"):
        read_settings_text(tmp_path / "a.yaml", limit=3)
    with pytest.raises(InputError, match="no such file"):
        read_settings_text(tmp_path / "b.yaml", limit=3)


def test_values_in_messages_are_cut() -> None:
    assert shown("a" * 38) == repr("a" * 38)
    assert shown("a" * 39) == "'" + "a" * 36 + "..."


PIECES = [
    *"[]{},:-?&*!|>'\"%@`#=<~\t\n ",
    "!!int ",
    "!!timestamp ",
    "*a",
    "&a ",
    "<<: ",
    "2001-99-99",
    "\x00",
    "\ud800",
]


@pytest.mark.parametrize(
    ("parse", "start"), [(parse_yaml, "a: [1, {b: 2.5}]\nc: 'x'\n"), (parse_json, '{"a": [1, {"b": 2.5}]}')]
)
def test_mutated_text_gives_our_errors_alone(parse: Callable[[str, str], object], start: str) -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        text = list(start)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 2)] = rng.choice(PIECES) * rng.choice((1, 1, 1, 500))
        begin = time.process_time()
        try:
            parse("".join(text), "f")
        except InputError:
            refused += 1
        assert time.process_time() - begin < 1, text
    assert 200 < refused < 2000


OTHER_READERS = {
    *(
        "yaml.load",
        "yaml.safe_load",
        "yaml.full_load",
        "yaml.unsafe_load",
        "yaml.load_all",
        "yaml.safe_load_all",
    ),
    *("csv.reader", "csv.DictReader"),
    *("json.load", "json.loads", "json.JSONDecoder"),
    *("tarfile.open", "tarfile.TarFile", "shutil.unpack_archive"),
}


def other_readers(tree: ast.Module) -> list[int]:
    """Lines of a file that read YAML, CSV, JSON or tar by the libraries themselves."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in OTHER_READERS)
        or (
            isinstance(node, ast.ImportFrom)
            and any(f"{node.module}.{alias.name}" in OTHER_READERS for alias in node.names)
        )
    ]


def test_no_other_module_reads_yaml_csv_json_or_tar() -> None:
    """``networks.yaml`` is a file of the package, which has aliases."""
    assert other_readers(ast.parse("import csv\nfrom yaml import safe_load\ncsv.reader(x)")) == [2, 3]
    assert other_readers(ast.parse("from json import dumps, loads\njson.dumps(json.load(x))")) == [1, 2]
    found = {str(path) for path, tree in package_trees().items() if other_readers(tree)}
    assert found == {"fastfold/utils/foreign_text.py", "fastfold/evoformer/config.py"}


def test_values_of_yaml_may_stay_as_they_are_written() -> None:
    text = "a: no\nb: 007\nc: 1e3\nd: ~\ne: [on, 2024-10-01]\nf: 'x'\n"
    values = {"a": "no", "b": "007", "c": "1e3", "d": None, "e": ["on", "2024-10-01"], "f": "x"}
    assert parse_yaml(text, "f.yaml", as_text=True) == values
