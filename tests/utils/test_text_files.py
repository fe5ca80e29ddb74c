"""JSON files that are tables, and packed files; how bytes are read is tested with FASTA files."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.utils.text_files import (
    json_object_or_none,
    read_file_bytes,
    read_json_object,
    read_packed_text,
)


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


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_packed_text_is_known_by_its_content(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """Up to the limit of the unpacked text; the name does not count."""
    path = tmp_path / "text.xz"
    path.write_bytes(pack("\ufeffé".encode() + b"x" * 5000))
    assert read_packed_text(path, limit=5010) == "é" + "x" * 5000
    with pytest.raises(InputError, match="larger than 5,000 bytes"):
        read_packed_text(path, limit=5000)
    path.write_bytes(pack(b"x" * 5000)[:-3])
    if pack is not bytes:
        with pytest.raises(InputError, match="is a damaged"):
            read_packed_text(path, limit=9000)


def test_other_packed_files_are_refused(tmp_path: Path) -> None:
    for content, said in (
        (b"\x28\xb5\x2f\xfdx", "packed by zstd; unpack it"),
        (b"\xff\xfea", "text in UTF-16"),
    ):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(InputError, match=said):
            read_packed_text(tmp_path / "x", limit=100)


def test_bytes_are_read_as_they_are(tmp_path: Path) -> None:
    content = gzip.compress(b"x")
    (tmp_path / "x").write_bytes(content)
    assert read_file_bytes(tmp_path / "x", limit=len(content)) == content
    with pytest.raises(InputError, match="larger than"):
        read_file_bytes(tmp_path / "x", limit=len(content) - 1)
