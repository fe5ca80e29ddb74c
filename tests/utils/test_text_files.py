"""JSON files that are tables; how bytes are read is tested with FASTA files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.utils.text_files import json_object_or_none, read_json_object


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
