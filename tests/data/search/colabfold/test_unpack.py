"""An archive from a server gives the files that are wanted, or nothing at all, and never writes."""

from __future__ import annotations

import gzip
import random
import tarfile
import time

import pytest

from fastfold.data.search.colabfold import server_templates
from fastfold.data.search.colabfold.server_templates import read_archive
from fastfold.errors import InputError
from tests.helpers.stand_in_msa_server import bomb, tar_gz

WANTED = frozenset(("uniref.a3m", "pair.a3m"))
GOOD = tar_gz({"uniref.a3m": random.Random(0).randbytes(5000), "./pair.a3m": b"b", "msa.sh": b"#"})


def special(kind: bytes, name: str = "uniref.a3m", target: str = "/etc/passwd") -> tarfile.TarInfo:
    """A member that is not a plain file."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_wanted_files_are_read_and_others_are_not() -> None:
    found = read_archive(GOOD, WANTED, origin="server")
    assert set(found) == WANTED
    assert (len(found["uniref.a3m"]), found["pair.a3m"]) == (5000, b"b")
    assert read_archive(tar_gz({"x": b"y"}), WANTED, origin="server") == {}
    assert read_archive(tar_gz({"folder": special(tarfile.DIRTYPE, "folder")}), WANTED, origin="server") == {}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (tar_gz({"../uniref.a3m": b"x"}), "leads out of it"),
        (tar_gz({"a/../../x": b"x"}), "leads out of it"),
        (tar_gz({"/uniref.a3m": b"x"}), "leads out of it"),
        (tar_gz({"x": special(tarfile.SYMTYPE)}), "is not a plain file"),
        (tar_gz({"x": special(tarfile.LNKTYPE, "other")}), "is not a plain file"),
        (tar_gz({"x": special(tarfile.FIFOTYPE)}), "is not a plain file"),
        (tar_gz({"x": special(tarfile.CHRTYPE)}), "is not a plain file"),
        (tar_gz({str(i): b"" for i in range(1001)}), "more than 1000 members"),
        (tar_gz({"uniref.a3m": b"x", "./uniref.a3m": b"y"}), "two members"),
    ],
)
def test_what_an_honest_archive_has_not_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(InputError, match=f"server: the result .*{expected}.*; none of it was used"):
        read_archive(data, WANTED, origin="server")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        GOOD[: len(GOOD) // 2],
        GOOD[:-6],
        GOOD[:100] + bytes([GOOD[100] ^ 255]) + GOOD[101:],
        gzip.compress(b"not a tar" * 200),
    ],
)
def test_what_is_damaged_says_so(data: bytes) -> None:
    with pytest.raises(InputError, match=r"damaged or truncated .*; run the same command again"):
        read_archive(data, WANTED, origin="server")


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_templates, "MAX_UNPACKED", 4 << 20)
    with pytest.raises(InputError, match="unpacks to more than 4 MiB"):
        read_archive(bomb(64 << 20), WANTED, origin="server")


def with_pax(headers: dict[str, str]) -> bytes:
    """An archive whose first member, which is not wanted, has PAX headers."""
    member = tarfile.TarInfo("x")
    member.pax_headers = headers
    return tar_gz({"x": member, "uniref.a3m": b"y"})


@pytest.mark.parametrize(
    "headers",
    [
        {"size": str(10**17)},
        {"size": str(10**30)},
        {"size": "-512"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(10**17)},
        {"GNU.sparse.map": "0,x", "GNU.sparse.size": "1"},
    ],
)
def test_sizes_in_pax_headers_neither_hang_nor_crash(headers: dict[str, str]) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match="server: the result"):
        read_archive(with_pax(headers), WANTED, origin="server")
    assert time.monotonic() - start < 5


def test_a_long_row_of_headers_without_a_file_is_an_error() -> None:
    header = gzip.decompress(with_pax({"comment": "x"}))[:1024]
    with pytest.raises(InputError, match="damaged or truncated"):
        read_archive(gzip.compress(header * 3000), WANTED, origin="server")


def _refused(number: int) -> int:
    """Read mutated archives and return how many were refused."""
    rng, refused = random.Random(0), 0
    pax = {"size": "1", "path": "uniref.a3m", "mtime": "1.5"}
    sources = [
        gzip.decompress(data)
        for data in (tar_gz({"uniref.a3m": b"x" * 700, "pair.a3m": b"y"}), with_pax(pax))
    ]
    sparse = with_pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "uniref.a3m"})
    sources.append(gzip.decompress(sparse))
    pieces = [b"9" * 11, b"\x80" + b"\xff" * 11, b"-1", b"../", b"\0", b"S", b"x", b"g", b"L", b"\n", b"="]
    for _ in range(number):
        data = bytearray(rng.choice(sources))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(len(data), 3000))
            piece = rng.choice(pieces)
            data[at : at + len(piece)] = piece
        for start in range(0, len(data) - 512, 512):  # honest checksums, so that headers are read further
            if data[start + 257 : start + 262] == b"ustar":
                block = data[start : start + 148] + b" " * 8 + data[start + 156 : start + 512]
                data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
        begin = time.monotonic()
        try:
            found = read_archive(gzip.compress(bytes(data), 1), WANTED, origin="server")
        except InputError:
            refused += 1
        else:
            assert set(found) <= WANTED
        assert time.monotonic() - begin < 5
    return refused


def test_mutated_archives_are_read_or_refused() -> None:
    assert 100 < _refused(400) < 400


@pytest.mark.slow
def test_ten_thousand_mutated_archives_are_read_or_refused() -> None:
    assert 3000 < _refused(10_000) < 10_000


def test_an_archive_that_unpacks_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The download has a deadline of its own."""
    clock = iter(range(0, 10**6, 400))
    monkeypatch.setattr(server_templates.time, "monotonic", lambda: float(next(clock)))
    data = tar_gz({"uniref.a3m": bytes(4 << 20)})
    with pytest.raises(InputError, match="does not unpack within 10 minutes; none of it was used"):
        read_archive(data, WANTED, origin="server")
