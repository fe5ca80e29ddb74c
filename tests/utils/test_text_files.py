"""Packed files and files of bytes; plain text is tested with FASTA files."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.utils.text_files import read_file_bytes, read_packed_text


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
