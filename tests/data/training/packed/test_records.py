"""Files of records: what was written comes back, damage is told, and nothing half written appears."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.training.packed.records import (
    _MAGIC,
    _START,
    RecordFile,
    open_packed,
    writing_records,
)
from fastfold.errors import InputError, OutputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with writing_records(tmp_path / "set") as writer:
        writer.set_meta({"name": "set"})
        for number in range(5):
            writer.add("even" if number % 2 == 0 else "odd", bytes([number]) * number)
            if number == 2:
                writer.add_array("between", np.arange(7, dtype=np.float64))
        writer.add_array("table", np.array([[1, 2], [3, 4]], np.int32))
    return tmp_path / "set"


def test_records_and_arrays_come_back(path: Path) -> None:
    file = RecordFile(path)
    assert file.meta == {"name": "set"}
    for found in (file, pickle.loads(pickle.dumps(file))):
        assert [found.count(name) for name in ("even", "odd", "none")] == [3, 2, 0]
        assert [found.record("even", i) for i in range(3)] == [b"", b"\2\2", b"\4\4\4\4"]
        assert found.record("odd", 1) == b"\3\3\3"
        np.testing.assert_array_equal(found.array("between"), np.arange(7.0))
        np.testing.assert_array_equal(found.array("table"), [[1, 2], [3, 4]])
        assert not found.array("table").flags.writeable
    assert [other.name for other in path.parent.iterdir()] == ["set"]


def test_a_flipped_bit_of_a_record_is_told(path: Path) -> None:
    """The others can still be read."""
    content = bytearray(path.read_bytes())
    content[content.index(b"\4\4\4\4")] ^= 1
    path.write_bytes(content)
    file = RecordFile(path)
    assert file.record("odd", 1) == b"\3\3\3"
    with pytest.raises(InputError, match="record 2 of 'even' is damaged"):
        file.record("even", 2)


def test_what_is_no_such_file_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for damaged, message in (
        (content[:-1], "is truncated or damaged"),
        (content[:-3] + b"x" + content[-2:], "is truncated or damaged"),
        (b"another" + content[7:], "is not a packed training set"),
        (content[:20], "is not a packed training set"),
        (b"", "cannot be read|is not a packed"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=message):
            RecordFile(path)
    with pytest.raises(InputError, match="no such file"):
        RecordFile(tmp_path / "none")


def test_only_files_of_records_are_opened(path: Path, tmp_path: Path) -> None:
    (tmp_path / "table.tsv").write_text("name")
    for other in (tmp_path, tmp_path / "table.tsv", tmp_path / "none"):
        assert open_packed(other) is None
    opened = open_packed(path)
    assert opened is not None
    assert opened.meta == {"name": "set"}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="is truncated or damaged"):
        open_packed(path)


def test_an_error_on_the_way_leaves_what_was_there(path: Path) -> None:
    before = path.read_bytes()

    def fail() -> None:
        with writing_records(path) as writer:
            writer.add("even", b"new")
            raise InputError("stop")

    with pytest.raises(InputError, match="stop"):
        fail()
    assert path.read_bytes() == before
    assert [other.name for other in path.parent.iterdir()] == ["set"]
    with pytest.raises(OutputError), writing_records(path.parent / "none" / "set"):
        pass


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[" * 5000,
        b'{"meta": {}, "arrays": {"a": ' + b"9" * 5000 + b"}}",
        b'{"meta": {}, "arrays": {"a": ["<f8", [4], 1000000000000]}}',
        b'{"meta": {}, "arrays": {"a": ["<f8", [-4], 0]}}',
        b'{"meta": {}, "arrays": {"a": ["|O", [4], 0]}}',
    ],
    ids=["empty", "nested", "digits", "outside", "negative", "objects"],
)
def test_a_foreign_header_with_the_right_checksum_is_refused(header: bytes, path: Path) -> None:
    """It is refused as the file is opened, not where a sample is read in another process."""
    content = path.read_bytes()[: _START.size]
    start = _START.pack(_MAGIC, _START.size, len(header), zlib.crc32(header))
    path.write_bytes(start + content[len(start) :] + header + bytes(64))
    with pytest.raises(InputError, match="has an unknown header"):
        RecordFile(path)
