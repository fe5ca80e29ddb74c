"""Every record of a database is in exactly one part, however the file is cut."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fastfold.data.search.database import split_database
from fastfold.errors import InputError

RECORDS = [f">r{n} some words > and signs\n{'MKVLAT' * (n % 7 + 1)}\n{'GG' * (n % 3)}\n" for n in range(40)]
LONG = ">long\n" + "MKVA\n" * 300


def _parts(path: Path, workers: int, part_bytes: int, chunk_bytes: int) -> list[list[bytes]]:
    rounds = split_database(path, workers, part_bytes, chunk_bytes=chunk_bytes)
    return [[part.read() for part in parts] for parts in rounds]


def _records(text: bytes) -> list[bytes]:
    return [record.rstrip(b"\n>") for record in (b"\n" + text).split(b"\n>") if record.strip()]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("part_bytes", "chunk_bytes"), [(64, 16), (200, 37), (1 << 20, 100), (1 << 20, 1 << 18)]
)
def test_parts_hold_every_record_once(
    tmp_path: Path, packed: bool, workers: int, part_bytes: int, chunk_bytes: int
) -> None:
    text = "".join([*RECORDS[:20], LONG, *RECORDS[20:]]).encode()
    path = tmp_path / "db"
    path.write_bytes(gzip.compress(text) if packed else text)
    rounds = _parts(path, workers, part_bytes, chunk_bytes)
    assert {len(parts) for parts in rounds} == {workers}
    found = [record for parts in rounds for part in parts for record in _records(part)]
    assert sorted(found) == sorted(_records(text))
    assert all(part.startswith(b">") for parts in rounds for part in parts if part)


def test_neighbours_fall_to_different_workers(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_text("".join(RECORDS))
    first, second = _parts(path, 2, 1 << 20, 100)[0]
    numbers = [[int(record.split(b" ")[0][1:]) for record in _records(text)] for text in (first, second)]
    assert max(numbers[0]) > min(numbers[1]) > min(numbers[0])
    assert min(map(len, numbers)) > 10


@pytest.mark.parametrize(
    "text", [">a\r\nMKV\r\n>b\r\nMKA\r\n", "\n\n>a\nMKV\n\n>b\nMKA", ">a\nMKV\n>b\nMKA\n\n"]
)
def test_line_ends_and_blank_lines_do_not_matter(tmp_path: Path, text: str) -> None:
    path = tmp_path / "db"
    path.write_bytes(text.encode())
    for chunk_bytes in range(1, 12):
        parts = [part for parts in _parts(path, 2, 8, chunk_bytes) for part in parts]
        letters = sorted("".join(part.decode().split()) for part in parts if part.strip())
        assert letters in ([">aMKV", ">bMKA"], [">aMKV>bMKA"])


def test_members_of_a_gzip_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "db.gz"
    path.write_bytes(gzip.compress(RECORDS[0].encode()) + gzip.compress(RECORDS[1].encode()))
    (parts,) = _parts(path, 1, 1 << 20, 1 << 18)
    assert parts == ["".join(RECORDS[:2]).encode()]


def test_a_cut_gzip_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "db.gz"
    path.write_bytes(gzip.compress("".join(RECORDS).encode())[:-20])
    with pytest.raises(InputError, match=r"db\.gz: is a damaged gzip file \(.*\); download or copy it again"):
        _parts(path, 2, 1 << 20, 64)


def test_a_part_whose_text_was_lost_is_an_error_and_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "db.gz"
    path.write_bytes(gzip.compress("".join(RECORDS).encode()))
    (part,) = next(iter(split_database(path, 1, 1 << 20)))
    with pytest.raises(OSError, match="a worker process was lost"):
        part._replace(text=None).read()
