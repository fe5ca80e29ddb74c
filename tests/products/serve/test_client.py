"""Answers of other services, broken downloads and control characters end in one error of our own."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastfold.errors import ConfigError, InputError, NetworkError
from fastfold.products.serve import client as clients
from fastfold.products.serve.client import Client, RefusedError, read_templates
from tests.helpers.loopback import Request, loopback

JOB = {
    "id": "0" * 32,
    "name": "q",
    "state": "done",
    "position": None,
    "files": ["a"],
    "text": "t",
    "scores": {},
}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in JOB.items() if name != key}


def stream(*events: tuple[str, str]) -> bytes:
    return "".join(f"event: {kind}\ndata: {data}\n\n" for kind, data in events).encode()


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"null", b"7", b"<html>", b"[" * 100_000, b"", b"\xff"),
        *(json.dumps(without(key)).encode() for key in ("id", "name", "state", "text", "files", "scores")),
        json.dumps(JOB | {"files": 5}).encode(),
        json.dumps(JOB | {"state": "eaten"}).encode(),
        json.dumps(JOB | {"position": "first"}).encode(),
        *(json.dumps(JOB | {"id": name}).encode() for name in ("", "../x", "a" * 101, "\x1b[2J")),
    ],
)
def test_an_answer_of_another_service_names_the_address(body: bytes) -> None:
    with loopback(lambda request: request.send(200, body)) as server:
        client = Client(server.url, patience=0)
        with pytest.raises(
            NetworkError, match=f"{server.url}/v1/jobs.*is this the address of a server of FastFold"
        ):
            client.submit("MKV")
        with pytest.raises(NetworkError, match=f"{server.url}/v1/jobs"):
            client.job("0" * 32)


@pytest.mark.parametrize(
    "body",
    [
        stream(("state", "null")),
        stream(("state", "[]")),
        stream(("progress", "{}")),
        stream(("progress", "7")),
        stream(("state", json.dumps(without("files")))),
        stream(("state", "{")),
    ],
)
def test_an_event_of_another_form_names_the_address(body: bytes) -> None:
    with (
        loopback(lambda request: request.send(200, body)) as server,
        pytest.raises(NetworkError, match=f"{server.url}/v1/jobs/0+/events"),
    ):
        Client(server.url, patience=0).wait("0" * 32)


def test_endless_answers_and_events_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_MAX_ANSWER", 1 << 16)

    def endless(request: Request) -> None:
        request.handler.send_response(200)
        request.handler.end_headers()
        request.handler.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                request.handler.wfile.write(b"a" * (1 << 14))

    with loopback(endless) as server:
        client = Client(server.url, patience=0)
        with pytest.raises(NetworkError, match="the server sends more than 65,536 bytes"):
            client.job("0")
        with pytest.raises(NetworkError, match="an event has no end"):
            client.wait("0")
        with pytest.raises(NetworkError, match="does not state the file's size"):
            client.download(JOB, "out")


def test_a_stream_that_always_ends_is_given_up() -> None:
    with loopback(lambda request: request.send(200, b"")) as server:
        begin = time.monotonic()
        with pytest.raises(
            NetworkError, match=r"the stream ends without an answer.* gave up after 2 attempts"
        ):
            Client(server.url, patience=0.5).wait("0")
        assert time.monotonic() - begin < 5
        assert len(server.requests) == 2


def test_control_characters_never_reach_a_terminal() -> None:
    body = stream(
        ("progress", json.dumps({"line": "\x1b]0;owned\x07\x1b[2J\rX"})),
        ("state", json.dumps(JOB | {"text": "a\x1b[2Jb", "name": "q\x07"})),
    )
    lines: list[str] = []
    with loopback(lambda request: request.send(200, body)) as server:
        job = Client(server.url).wait("0", lines.append)
    assert lines == [" ]0;owned  [2J X"]
    assert (job["text"], job["name"]) == ("a [2Jb", "q ")


CONTENT = bytes(range(256)) * 1000


def test_a_download_that_breaks_off_is_resumed(tmp_path: Path) -> None:
    """As with a proxy that cuts every answer after 64 KiB."""

    def cut(request: Request) -> None:
        start = request.start_of_range()
        lines = {
            "Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}",
            "Content-Length": str(len(CONTENT) - start),
        }
        request.send(206, CONTENT[start : start + 65_536], lines)

    said: list[str] = []
    with loopback(cut) as server:
        (path,) = Client(server.url, token="secret", say=said.append).download(JOB, tmp_path)
        assert len(said) == 3
        assert "closed after 65,536 of 256,000 bytes); trying again in 1 s" in said[0]
        assert path.read_bytes() == CONTENT
        assert len(server.requests) == 4
        assert {request.headers["Authorization"] for request in server.requests} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda request: request.send(200, CONTENT, drop_after=1), NetworkError),
        (lambda request: request.send(404, b'{"error": "no such file"}'), RefusedError),
    ],
)
def test_a_download_without_all_its_bytes_leaves_no_file(
    tmp_path: Path, answer: Callable[[Request], None], error: type[Exception]
) -> None:
    with (
        loopback(answer) as server,
        pytest.raises(error, match=r"closed after 1 of 256,000 bytes|no such file"),
    ):
        Client(server.url, patience=0).download(JOB, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "/a", ".a", "", "a\\b", "c:a", "a\x1b[2J", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with (
        loopback(lambda request: request.send(200, CONTENT)) as server,
        pytest.raises(NetworkError, match="expected the name of a file"),
    ):
        Client(server.url).download(JOB | {"files": [name]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_sum_is_refused(tmp_path: Path) -> None:
    headers = {"Repr-Digest": f"sha-256=:{'A' * 43}=:"}
    with (
        loopback(lambda request: request.send(200, CONTENT, headers)) as server,
        pytest.raises(InputError, match="differs from the sha256 sum that its server states"),
    ):
        Client(server.url).download(JOB, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_any_size_is_refused(tmp_path: Path) -> None:
    lines = {"Content-Length": str(10**14)}
    with (
        loopback(lambda request: request.send(200, b"", lines)) as server,
        pytest.raises(NetworkError, match="expected a file of results, found 100,000,000,000,000 bytes"),
    ):
        Client(server.url).download(JOB, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_largest_size_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback(lambda request: request.send(200, CONTENT)) as server:
        monkeypatch.setattr(clients, "_MAX_FILE", len(CONTENT))
        assert [path.read_bytes() for path in Client(server.url).download(JOB, tmp_path)] == [CONTENT]
        monkeypatch.setattr(clients, "_MAX_FILE", len(CONTENT) - 1)
        with pytest.raises(NetworkError, match="expected a file of results, found 256,000 bytes"):
            Client(server.url).download(JOB, tmp_path)


def test_templates_are_read_by_name_and_names_are_unique(tmp_path: Path) -> None:
    texts = {"a.cif": "data_a", "b.pdb": "ATOM \ufffd"}
    (tmp_path / "a.cif.gz").write_bytes(gzip.compress(b"data_a"))
    (tmp_path / "b.pdb").write_bytes(b"ATOM \xff")
    paths = [tmp_path / "a.cif.gz", tmp_path / "b.pdb"]
    assert read_templates(paths) == texts
    assert read_templates([]) == {}
    (tmp_path / "a.cif").write_text("data_b")
    with pytest.raises(ConfigError, match=r"two files are named a\.cif; rename one"):
        read_templates([*paths, tmp_path / "a.cif"])
    with pytest.raises(InputError, match=r"c\.cif"):
        read_templates([tmp_path / "c.cif"])
