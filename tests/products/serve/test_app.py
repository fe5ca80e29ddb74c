"""A server on the loopback: jobs from submission to files, and requests that it refuses in one line."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from fastfold.products.serve import Client, RefusedError
from fastfold.products.serve.app import create_app
from fastfold.products.serve.limits import RequestLimits
from fastfold.products.serve.queue import QueueUnavailableError
from fastfold.products.serve.request import PROGRESS
from fastfold.products.serve.service import Service
from fastfold.products.serve.submission import Settings
from tests.products.serve.stub import LONGEST, serving

ADA, BOB = "ada-" * 5, "bob-" * 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("data"), max_body=200_000) as (address, _):
        yield address


def with_tokens(folder: Path) -> AbstractContextManager[tuple[str, Service]]:
    tokens = folder / "tokens.txt"
    tokens.write_text(f"ada {ADA}\nbob {BOB}\n")
    tokens.chmod(0o600)
    return serving(folder / "data", tokens=tokens, max_jobs=1, body_seconds=0.5, head_seconds=0.5)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, Service]]:
    with with_tokens(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    """A server as :func:`guarded`, for the tests that submit nothing."""
    with with_tokens(tmp_path_factory.mktemp("guarded")) as found:
        yield found


def ask(server: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, data, given | {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text


def test_a_job_from_submission_to_its_files(server: str, tmp_path: Path):
    client = Client(server)
    lines: list[str] = []
    job = client.wait(client.submit("MKVLA", name="first")["id"], lines.append)
    assert (job["state"], job["text"], job["residues"]) == ("done", "MKVLA", 5)
    assert lines == ["first: recycle 0/0"]
    assert job["files"] == ["model.pdb", "report.html"]
    written = client.download(job, tmp_path)
    assert [path.read_text() for path in written] == ["REMARK MKVLA\n", "<html></html>"]
    status, _ = ask(server, "GET", f"/v1/jobs/{job['id']}/page")
    assert status == 303
    assert ask(server, "GET", job["page"]) == (200, b"<html></html>")
    assert client.job(job["id"]) == job
    assert job in client.jobs()
    client.remove(job["id"])
    with pytest.raises(RefusedError, match="no such job"):
        client.job(job["id"])


def test_each_format_is_taken_with_templates_and_settings(server: str):
    client = Client(server)
    template = {"1abc": "data_1ABC"}
    for given in ({"fasta": ">a\nMKV\n"}, {"a3m": ">a\nMKV\n>h\nMKL\n"}, {"sequence": "MKV"}):
        settings = {"num_recycles": 1, "seeds": [3], "max_msa": [4, 8], "relax": "none", "num_models": 1}
        job = client.submit(**given, templates=template, settings=settings)
        assert client.wait(job["id"])["text"] == "MKV"


def test_a_repeated_submission_is_one_job(server: str):
    client = Client(server)
    first = client.submit("MKV", key="the-same-key")
    assert client.submit("MKV", key="the-same-key")["id"] == first["id"]


def test_a_stream_continues_behind_the_last_event(server: str):
    client = Client(server)
    job = client.wait(client.submit("MKV", name="streamed")["id"])
    _, text = ask(server, "GET", f"/v1/jobs/{job['id']}/events")
    assert b'id: 22\nevent: progress\ndata: {"line": "streamed: recycle 0/0"}\n\nevent: state\n' in text
    _, text = ask(server, "GET", f"/v1/jobs/{job['id']}/events", Last_Event_ID="22")
    assert text.startswith(b"event: state\n")


REFUSED = {
    "no JSON": (b"{", 400, "the body is not JSON"),
    "deep JSON": (b"[" * 100_000, 400, "body"),
    "a list": ([], 422, "expected JSON"),
    "nothing": ({}, 400, "exactly one of sequence, fasta and a3m, found none"),
    "two formats": ({"sequence": "M", "fasta": ">a\nM"}, 400, "found sequence and fasta"),
    "a complex of a sequence": ({"sequence": "M", "complex": True}, 400, "complex belongs to fasta"),
    "another key": ({"sequence": "M", "out": "/tmp"}, 422, "out: Extra inputs"),
    "a path": (
        {"sequence": "M", "settings": {"restraints": "/etc/passwd"}},
        422,
        "settings.restraints: Extra",
    ),
    "a device": ({"sequence": "M", "settings": {"device": "cuda"}}, 422, "settings.device: Extra"),
    "a type": ({"sequence": 5}, 422, "sequence: Input should be a valid string"),
    "a boolean": ({"sequence": "M", "settings": {"dropout": "yes"}}, 422, "settings.dropout"),
    "not a number": (b'{"sequence": "M", "settings": {"recycle_tolerance": NaN}}', 422, "finite"),
    "a value": (
        {"sequence": "M", "settings": {"num_recycles": 10_000}},
        400,
        "num_recycles must be from 0 to",
    ),
    "a sequence": ({"sequence": "MK1V"}, 400, "digit '1' at position 3"),
    "too long": ({"sequence": "M" * (LONGEST + 1)}, 400, "501 residues would need more memory"),
    "a template": (
        {"sequence": "M", "templates": [{"name": "../x", "text": "data_"}]},
        422,
        "templates.0.name: String should match",
    ),
    "templates of one name": (
        {"sequence": "M", "templates": [{"name": n, "text": "data_"} for n in ("a", "A.cif")]},
        400,
        "two are named a.cif",
    ),
    "a priority": ({"sequence": "M", "priority": 11}, 422, "priority"),
    "huge": (b" " * 200_001, 413, "larger than 200,000 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_bodies_are_refused_in_one_line(server: str, case: str):
    body, status, message = REFUSED[case]
    found, answer = ask(server, "POST", "/v1/jobs", body)
    assert (found, message in answer["error"]) == (status, True), answer
    assert "\n" not in answer["error"]


def test_a_body_without_length_is_cut_at_the_limit(server: str):
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        connection.sendall(chunk * 4)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "path",
    ["..", "%2e%2e", "..%2f..%2fqueue.sqlite", "%2fetc%2fpasswd", ".hidden", "model.pdb%00", "answer.json"],
)
def test_only_listed_files_are_served(server: str, path: str):
    client = Client(server)
    job = client.wait(client.submit("MKV", key="listed-files")["id"])
    assert ask(server, "GET", f"/v1/jobs/{job['id']}/files/model.pdb")[0] == 200
    assert ask(server, "GET", f"/v1/jobs/{job['id']}/files/{path}")[0] == 404
    assert ask(server, "GET", f"/v1/jobs/{path}")[0] == 404


def test_a_file_that_was_replaced_by_a_link_is_not_served(guarded: tuple[str, Service], tmp_path: Path):
    server, service = guarded
    client = Client(server, ADA)
    job = client.wait(client.submit("MKV")["id"])
    address, head = f"/v1/jobs/{job['id']}/files/model.pdb", {"Authorization": f"Bearer {ADA}"}
    assert ask(server, "GET", address, **head) == (200, b"REMARK MKV\n")
    queued = service.queue.get(job["id"])
    assert queued is not None
    path = service.file(queued, "model.pdb")
    (tmp_path / "secret").write_text("secret")
    path.unlink()
    assert ask(server, "GET", address, **head)[0] == 404
    path.symlink_to(tmp_path / "secret")
    assert ask(server, "GET", address, **head)[0] == 404


def test_a_file_comes_with_its_sum(server: str):
    client = Client(server)
    job = client.wait(client.submit("MKV", key="listed-files")["id"])
    request = urllib.request.Request(
        f"{server}/v1/jobs/{job['id']}/files/model.pdb", headers={"Range": "bytes=1-"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert (answer.status, answer.read()) == (206, b"EMARK MKV\n")
        sum_of_all = base64.b64encode(hashlib.sha256(b"REMARK MKV\n").digest()).decode()
        assert answer.headers["Repr-Digest"] == f"sha-256=:{sum_of_all}:"


def test_heads_are_those_of_whole_answers(server: str):
    """``curl -I``, ``wget --spider`` and monitors ask for the head alone; a stream has none of its own."""
    client = Client(server)
    job = client.wait(client.submit("MKHEAD")["id"])
    own = f"/v1/jobs/{job['id']}"
    for path in ("/", "/healthz", "/metrics", "/openapi.json", "/v1/jobs", own, f"{own}/files/model.pdb"):
        connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=20)
        heads = []
        for method in ("GET", "HEAD"):
            connection.request(method, path)
            answer = connection.getresponse()
            heads.append((answer.status, answer.headers["Content-Type"]))
            assert bool(answer.read()) == (method == "GET")
        connection.close()
        assert heads[0] == heads[1]
        assert heads[0][0] == 200
    described = ask(server, "GET", "/openapi.json")[1]["paths"]
    assert not any("head" in methods for methods in described.values())
    assert ask(server, "HEAD", f"{own}/events")[0] == 405


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/jobs", "GET, HEAD, POST"),
        ("/v1/jobs/0", "DELETE, GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/v1/jobs/0/events", "GET"),
    ],
)
def test_a_refused_method_names_all_others(server: str, path: str, methods: str):
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=20)
    connection.request("PUT", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert (answer.status, answer.headers["Allow"]) == (405, methods)


def test_a_page_of_another_site_cannot_reach_a_server_without_tokens(server: str):
    assert ask(server, "GET", "/v1/jobs", Host="evil.example.org")[0] == 400
    for kind in ("text/plain", ""):
        status, answer = ask(server, "POST", "/v1/jobs", b'{"sequence": "M"}', Content_Type=kind)
        assert status in (415, 422)
        assert "expected" in answer["error"]
        assert "Content-Type: application/json" in answer["error"]


def test_users_see_their_own_jobs_within_their_limit(guarded: tuple[str, Service]):
    server, service = guarded
    service.dispatcher.stop()  # so that jobs wait
    ada, bob = Client(server, ADA), Client(server, BOB)
    job = ada.submit("MKV")
    assert (job["state"], job["position"]) == ("queued", 0)
    with pytest.raises(RefusedError, match="ada has 1 unfinished jobs"):
        ada.submit("MKV")
    assert bob.submit("MKL", priority=1)["number"] == 2
    with pytest.raises(RefusedError, match="no such job") as refused:
        bob.remove(job["id"])
    assert refused.value.status == 404
    ada.remove(job["id"])
    assert ada.job(job["id"])["state"] == "cancelled"
    assert [one["name"] for one in bob.jobs()] == ["query"]


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer wrong", f"Basic {ADA}"])
def test_requests_without_a_known_token_are_refused_before_their_body(
    unchanged: tuple[str, Service], token: str
):
    server, _ = unchanged
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/metrics")):
        status, answer = ask(server, method, path, Authorization=token)
        assert (status, answer["error"].partition(";")[0]) == (401, "missing or unknown token")
    assert ask(server, "GET", "/healthz") == (200, {"status": "ok"})


def test_clients_that_send_slowly_are_given_up(unchanged: tuple[str, Service]):
    server, _ = unchanged
    host, port = server.removeprefix("http://").split(":")
    start = time.monotonic()
    with (
        socket.create_connection((host, int(port)), timeout=20) as body,
        socket.create_connection((host, int(port)), timeout=20) as head,
    ):
        start_of_body = f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {ADA}\r\n"
        body.sendall(f"{start_of_body}Content-Length: 9\r\n\r\n{{".encode())
        head.sendall(b"GET /healthz HTTP/1.1\r\nHos")
        assert body.recv(100).startswith(b"HTTP/1.1 408")
        assert head.recv(100) == b""
    assert 0.4 < time.monotonic() - start < 15


def test_old_answers_and_folders_of_cut_off_submissions_are_removed(tmp_path: Path):
    with serving(tmp_path) as (server, service):
        job = Client(server).wait(Client(server).submit("MKV")["id"])
        (tmp_path / "jobs" / ("0" * 32)).mkdir()
        (tmp_path / "jobs" / "of somebody else").mkdir()
    with serving(tmp_path, keep_days=1.0) as (server, _):
        names = {path.name for path in (tmp_path / "jobs").iterdir()}
        assert names == {job["id"], "of somebody else"}
        (found,) = Client(server).jobs()
        assert found | {"page": job["page"]} == job  # each server signs its own addresses
    with serving(tmp_path, keep_days=0.0) as (server, service):
        assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["of somebody else"]
        assert service.queue.counts() == {}


def test_progress_continues_behind_the_last_complete_line(guarded: tuple[str, Service]):
    """A carriage return within a line, of a foreign message, counts as its other bytes."""
    _, service = guarded
    job: Any = SimpleNamespace(id="0" * 32)
    folder = service.options.data / "jobs" / job.id
    folder.mkdir()
    content = "one\r\nof a tool\rtwo\n\ndréi\nnot yet"
    (folder / PROGRESS).write_bytes(content.encode())
    lines, offset = service.progress(job, 0)
    assert [line for _, line in lines] == ["one", "of a tool\rtwo", "", "dréi"]
    assert offset == lines[-1][0] == len(content.encode()) - len("not yet")
    for (end, _), rest in zip(lines, (lines[1:], lines[2:], lines[3:], []), strict=True):
        assert service.progress(job, end) == (rest, offset)


def test_health_names_the_problem_and_metrics_count(guarded: tuple[str, Service]):
    server, service = guarded
    ada = Client(server, ADA)
    ada.wait(ada.submit("MKV")["id"])
    service.dispatcher.stop()  # a folded group would end the problem
    service.dispatcher.problem = "the disk is full"
    assert ask(server, "GET", "/healthz") == (503, {"error": "the disk is full"})
    _, text = ask(server, "GET", "/metrics", Authorization=f"Bearer {ADA}")
    assert b'fastfold_submissions_total{status="201"} 1.0' in text


def test_the_description_asks_for_a_token_where_the_server_does(server: str, unchanged: tuple[str, Service]):
    for address, needs_token in ((server, False), (unchanged[0], True)):
        _, described = ask(address, "GET", "/openapi.json")
        assert ("security" in described["paths"]["/v1/jobs"]["post"]) == needs_token


def test_the_interface_is_described(unchanged: tuple[str, Service]):
    status, found = ask(unchanged[0], "GET", "/openapi.json")
    assert (status, found) == (200, create_app(unchanged[1]).openapi())
    assert {"/v1/jobs", "/v1/jobs/{job}/events", "/v1/jobs/{job}/files/{name}"} <= set(found["paths"])
    names = set(found["components"]["schemas"]["Settings"]["properties"])
    assert {"num_recycles", "seeds"} <= names
    assert names == set(Settings.model_fields)
    assert not names & {"device", "initial_guess", "restraints", "offload_dir", "memory_budget"}


def test_an_unreachable_server_is_one_error(tmp_path: Path):
    from fastfold.errors import NetworkError

    with pytest.raises(NetworkError, match="cannot reach"):
        Client("http://127.0.0.1:1", patience=0).jobs()


@pytest.mark.parametrize(("text", "status"), [("database is locked", 503), ("database or disk is full", 507)])
def test_a_queue_that_cannot_be_used_says_when_to_try_again(
    guarded: tuple[str, Service], monkeypatch: pytest.MonkeyPatch, text: str, status: int
):
    address, service = guarded

    def fails(*_: object, **__: object) -> None:
        raise QueueUnavailableError(sqlite3.OperationalError(text))

    monkeypatch.setattr(service.queue, "admit", fails)
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADA}"}
    connection.request("POST", "/v1/jobs", b'{"sequence": "MKV"}', headers)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (status, "10")
    assert text in json.loads(answer.read())["error"]
    assert list((service.options.data / "jobs").iterdir()) == []


def test_a_job_that_cannot_be_written_is_not_an_internal_error(
    guarded: tuple[str, Service], monkeypatch: pytest.MonkeyPatch
):
    address, _ = guarded

    def full(folder: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fastfold.products.serve.service.sync_folder", full)
    status, body = ask(address, "POST", "/v1/jobs", {"sequence": "MKV"}, Authorization=f"Bearer {ADA}")
    assert status == 507
    assert "the disk is full" in body["error"]


def test_idle_clients_shut_nobody_out(tmp_path: Path):
    """They are closed for new ones, the oldest first."""
    with serving(tmp_path, max_connections=5) as (server, _), contextlib.ExitStack() as opened:
        host, _, port = server.removeprefix("http://").partition(":")
        for _ in range(20):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=20))
        assert ask(server, "GET", "/healthz") == (200, {"status": "ok"})
        assert ask(server, "GET", "/v1/jobs") == (200, [])


def test_an_invalid_request_is_answered_in_json(server: str):
    host, _, port = server.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body) == {"error": "Invalid HTTP request received."}


def test_a_key_belongs_to_one_submission(server: str):
    client = Client(server)
    first = client.submit("MKV", key="key-of-one-body")
    assert client.submit("MKV", key="key-of-one-body")["id"] == first["id"]
    with pytest.raises(
        RefusedError, match=f"the Idempotency-Key belongs to the job {first['id']}"
    ) as refused:
        client.submit("MKL", key="key-of-one-body")
    assert refused.value.status == 422


def test_the_data_belong_to_the_servers_user(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with serving(data):
        assert data.stat().st_mode & 0o777 == 0o700


def test_old_answers_are_removed_without_a_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fastfold.products.serve.service._SWEEP_S", 0.1)
    with serving(tmp_path, keep_days=0.0) as (server, service):
        Client(server).submit("MKV")
        end = time.monotonic() + 30
        while service.queue.counts() or any((tmp_path / "jobs").iterdir()):
            assert time.monotonic() < end
            time.sleep(0.05)


STREAMING = """
import sys
from tests.products.serve.stub import run_stub
run_stub(sys.argv[1], int(sys.argv[2]), 1, 60.0, True)
"""


@pytest.mark.long
def test_a_signal_ends_streams_without_a_traceback(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", STREAMING, str(tmp_path), str(port)], stderr=subprocess.PIPE, text=True
    )
    job = Client(f"http://127.0.0.1:{port}").submit("MKV")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/v1/jobs/{job['id']}/events")
    stream = connection.getresponse()
    assert stream.readline() == b"event: state\n"
    process.send_signal(signal.SIGTERM)
    stream.read()
    assert process.communicate(timeout=60)[1] == ""


@pytest.mark.parametrize(("connections", "own"), [(3, 1), (9, 2), (20, 5)])
def test_a_user_with_a_token_has_a_quarter_of_the_connections(
    connections: int, own: int, tmp_path: Path
) -> None:
    """Without tokens there is one user, on this machine."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ada {ADA}\n")
    tokens.chmod(0o600)
    for file, expected, is_local in ((None, connections, True), (tokens, own, False)):
        limited = {
            "max_connections": connections,
            "max_body": 12_345,
            "body_seconds": 7.0,
            "send_seconds": 8.0,
        }
        folder = tmp_path / f"data_{is_local}"
        with serving(folder, tokens=file, **limited) as (_, service):
            app = create_app(service)
        (limits,) = (one.kwargs for one in app.user_middleware if one.cls is RequestLimits)
        assert (limits["max_own"], limits["max_requests"]) == (expected, connections)
        assert (limits["max_body"], limits["body_seconds"], limits["send_seconds"]) == (12_345, 7.0, 8.0)
        assert (limits["hosts"] is not None) == is_local
