"""An archive from a server gives the files that are wanted, or nothing at all, and never writes."""

from __future__ import annotations

import gzip
import random
import tarfile

import pytest

from fastfold.data.search.colabfold import unpack
from fastfold.data.search.colabfold.unpack import read_archive
from fastfold.errors import InputError
from tests.helpers.stand_in_msa_server import bomb, tar_gz

WANTED = frozenset(("uniref.a3m", "pair.a3m"))
GOOD = tar_gz({"uniref.a3m": random.Random(0).randbytes(5000), "./pair.a3m": b"b", "msa.sh": b"#"})


def special(kind: bytes, name: str = "uniref.a3m", target: str = "/etc/passwd") -> tarfile.TarInfo:
    """A member that is no plain file."""
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
        (tar_gz({"x": special(tarfile.SYMTYPE)}), "is no plain file"),
        (tar_gz({"x": special(tarfile.LNKTYPE, "other")}), "is no plain file"),
        (tar_gz({"x": special(tarfile.FIFOTYPE)}), "is no plain file"),
        (tar_gz({"x": special(tarfile.CHRTYPE)}), "is no plain file"),
        (tar_gz({str(i): b"" for i in range(1001)}), "more than 1000 members"),
        (tar_gz({"uniref.a3m": b"x", "./uniref.a3m": b"y"}), "two members"),
    ],
)
def test_what_an_honest_archive_has_not_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(InputError, match=f"server: the result .*{expected}.*; nothing of it was used"):
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
    with pytest.raises(InputError, match=r"damaged or cut off .*; run the same command again"):
        read_archive(data, WANTED, origin="server")


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "MAX_UNPACKED", 4 << 20)
    with pytest.raises(InputError, match="unpacks to more than 4 MiB"):
        read_archive(bomb(64 << 20), WANTED, origin="server")
