"""A piece of a source becomes a file with all of its bytes, or stays under a temporary name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fastfold.errors import InputError, NetworkError
from fastfold.utils.download.pieces import Piece, copy_piece, fetch_piece, local_piece, remote_piece
from fastfold.utils.download.remote_file import RemoteFile
from tests.helpers.loopback import Request, loopback

DATA = bytes(range(256)) * 1000
PIECE = Piece("a", "mirror/archive", io.BytesIO(DATA), 100, 200_000, ("v1",))
CONTENT = DATA[100:200_100]


def test_a_piece_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    said: list[str] = []
    steps: list[tuple[str, int, int]] = []
    PIECE.partial_path(tmp_path).write_bytes(CONTENT[:150_000])
    path = fetch_piece(PIECE, tmp_path, say=said.append, progress=lambda *step: steps.append(step))
    assert (path, path.read_bytes()) == (tmp_path / "a", CONTENT)
    assert said == ["a: resuming after 150,000 of 200,000 bytes"]
    assert (steps[0], steps[-1]) == (("a", 150_000, 200_000), ("a", 200_000, 200_000))
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("change", [{"version": ("v2",)}, {"offset": 99}, {"size": 199_999}])
def test_the_beginning_of_another_piece_is_removed(tmp_path: Path, change: dict[str, object]) -> None:
    other = replace(PIECE, **change).partial_path(tmp_path)  # type: ignore[arg-type]
    other.write_bytes(b"other")
    (tmp_path / "b.01234567.partial").touch()
    assert fetch_piece(PIECE, tmp_path).read_bytes() == CONTENT
    assert sorted(os.listdir(tmp_path)) == ["a", "b.01234567.partial"]


def test_a_file_that_is_too_long_begins_again(tmp_path: Path) -> None:
    PIECE.partial_path(tmp_path).write_bytes(b"x" * 200_001)
    assert fetch_piece(PIECE, tmp_path).read_bytes() == CONTENT


def test_a_source_that_ends_early_leaves_no_file(tmp_path: Path) -> None:
    short = replace(PIECE, source=io.BytesIO(DATA[:50_000]))
    with pytest.raises(NetworkError, match=r"^mirror/archive: ends within a: it is truncated$"):
        fetch_piece(short, tmp_path)
    assert not (tmp_path / "a").exists()
    assert PIECE.partial_path(tmp_path).read_bytes() == DATA[100:50_000]


def test_a_check_comes_before_the_name(tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        assert path.read_bytes() == CONTENT
        raise InputError("is not what it should be")

    with pytest.raises(InputError, match="not what it should be"):
        fetch_piece(PIECE, tmp_path, check=refuse)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_a_stated_sum_is_checked(tmp_path: Path, kind: str) -> None:
    right = hashlib.new(kind, CONTENT).hexdigest()
    copy_piece(replace(PIECE, digest=(kind, right)), tmp_path / "a")
    with pytest.raises(InputError, match=f"archive: differs from the {kind} sum that its server states"):
        copy_piece(replace(PIECE, digest=(kind, right[::-1])), tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("headers", "digest"),
    [
        ({"Repr-Digest": "sha-512=:AA==:, sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"}, "sha256"),
        ({"x-goog-hash": "crc32c=AAAAAA==,md5=1B2M2Y8AsgTpgAmY7PhCfg=="}, "md5"),
        ({"Repr-Digest": "sha-256=:AA==:"}, None),
        ({}, None),
    ],
)
def test_sums_of_servers_are_read(headers: dict[str, str], digest: str | None) -> None:
    """Of an empty file, as sha256sum and md5sum compute them."""
    with (
        loopback(lambda request: request.send(200, b"", headers)) as server,
        RemoteFile(server.url) as remote,
    ):
        expected = None if digest is None else (digest, hashlib.new(digest, b"").hexdigest())
        assert remote_piece(remote, "a").digest == expected


def test_a_file_of_unknown_size_is_no_piece() -> None:
    def answer(request: Request) -> None:
        request.handler.send_response(200)
        request.handler.end_headers()

    with (
        loopback(answer) as server,
        RemoteFile(server.url) as remote,
        pytest.raises(NetworkError, match="does not state the file's size"),
    ):
        remote_piece(remote, "a")


def test_a_file_on_the_disk_is_a_piece(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    with contextlib.ExitStack() as opened:
        piece = local_piece(tmp_path / "source", "a", opened)
        assert fetch_piece(piece, tmp_path).read_bytes() == DATA
