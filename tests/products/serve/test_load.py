"""Each job is answered once and in order, however many clients there are and whatever kills the server."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from fastfold.products.serve import Client, RefusedError
from fastfold.products.serve.queue import SIMILAR, JobQueue
from tests.helpers.forked import Forked
from tests.products.serve.stub import LONGEST, listener, run_stub


class Load:
    """Clients that submit mixed targets and wait for their answers."""

    def __init__(self, port: int, requests: int, clients: int) -> None:
        self._address, self._requests = f"http://127.0.0.1:{port}", requests
        self.answers: dict[str, tuple[str, dict[str, Any]]] = {}
        self.refused = 0
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._client, args=(number, clients), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.join(240)
        assert self.errors == []
        assert not any(thread.is_alive() for thread in self._threads)

    def _client(self, number: int, clients: int) -> None:
        try:
            client = Client(self._address, patience=120)
            draw = random.Random(number)
            jobs = [self._submit(client, draw, k) for k in range(number, self._requests, clients)]
            for job, sequence in filter(None, jobs):
                found = client.wait(job)
                assert job not in self.answers
                self.answers[job] = sequence, found
        except BaseException as error:
            self.errors.append(error)

    def _submit(self, client: Client, draw: random.Random, number: int) -> tuple[str, str] | None:
        """Submit a target of random length in one of the formats; every tenth is too long."""
        too_long = number % 10 == 9
        length = LONGEST + 1 if too_long else draw.randint(20, 400)
        sequence = "".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=length))
        given: dict[str, Any] = [
            {"sequence": sequence, "name": f"t{number}"},
            {"fasta": f">t{number}\n{sequence}\n"},
            {"a3m": f">t{number}\n{sequence}\n>h\n{'-' * length}\n"},
        ][number % 3]
        try:
            job = client.submit(**given, priority=draw.choice((0, 0, 0, 1)))
        except RefusedError as refusal:
            if not too_long or refusal.status != 400:
                raise
            self.refused += 1
            return None
        assert not too_long
        return job["id"], sequence

    def check(self, data: Path) -> None:
        """Check that each admitted job has one answer, its own, and that all were folded."""
        assert self.refused == self._requests // 10
        admitted = JobQueue(data / "queue.sqlite").jobs(limit=10_000)
        assert len(admitted) == len(self.answers) == self._requests - self.refused
        assert sorted(job.answer or 0 for job in admitted) == list(range(1, len(admitted) + 1))
        for job in admitted:
            sequence, found = self.answers[job.id]
            assert (found["state"], found["text"], found["answer"]) == ("done", sequence, job.answer)
            assert (job.residues, job.losses) == (len(sequence), 0)


def start(
    data: Path, port: int, *, group: int = 1, seconds: float = 0.0, in_processes: bool = False
) -> Forked:
    return Forked(run_stub, str(data), port, group, seconds, in_processes)


def run_and_kill(
    data: Path, load: Load, kills: int, port: int, at: float, *, seconds: float, **options: Any
) -> None:
    """Start the server, kill it ``kills`` times while the clients wait, and start it again."""
    server = start(data, port, seconds=seconds, **options)
    with load:
        for kill in range(kills):
            # Each kill comes when a further share of the jobs is answered, so there is always work left.
            share = (kill + 1) / (kills + 1)
            end = time.monotonic() + 120
            while _answered(data) < at * share and time.monotonic() < end:
                time.sleep(0.01)
            server.kill()
            server.wait()
            server = start(data, port, seconds=seconds, **options)
    server.kill()
    server.wait()


def _answered(data: Path) -> int:
    if not (data / "queue.sqlite").exists():
        return 0
    queue = JobQueue(data / "queue.sqlite")
    try:
        return queue.counts().get("done", 0)
    finally:
        queue.close()


def free_port() -> int:
    with listener() as sock:
        return int(sock.getsockname()[1])


def orders(data: Path) -> list[list[int]]:
    """Numbers of admission in the order of the answers, for each priority."""
    jobs = sorted(JobQueue(data / "queue.sqlite").jobs(limit=10_000), key=lambda job: job.answer or 0)
    return [[job.number for job in jobs if job.priority == priority] for priority in (0, 1)]


def test_a_killed_server_answers_each_job_once_and_in_order(tmp_path: Path):
    port = free_port()
    load = Load(port, 10, 3)
    run_and_kill(tmp_path, load, 1, port, 9, seconds=0.01)
    load.check(tmp_path)
    assert all(order == sorted(order) for order in orders(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 8])
def test_two_hundred_requests_while_the_server_is_killed_three_times(tmp_path: Path, group: int):
    port = free_port()
    load = Load(port, 200, 8)
    run_and_kill(tmp_path, load, 3, port, 180, seconds=0.1, group=group, in_processes=True)
    load.check(tmp_path)
    if group == 1:
        assert all(order == sorted(order) for order in orders(tmp_path))
        return
    # A job overtakes an earlier one only in the group of a job that precedes both, and is of similar length.
    jobs = {job.number: job for job in JobQueue(tmp_path / "queue.sqlite").jobs(limit=1000)}
    for order in orders(tmp_path):
        overtaken = [(a, b) for a, b in itertools.combinations(order, 2) if a > b]
        assert overtaken
        for later, earlier in overtaken:
            leaders = [n for n in order if n < earlier and jobs[n].residues / SIMILAR <= jobs[later].residues]
            assert any(jobs[later].residues <= jobs[n].residues * SIMILAR for n in leaders), (later, earlier)


def peak_memory(process: int) -> int:
    """Largest number of resident bytes that a process has had."""
    (line,) = [x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of an answer; 0 without one, which a busy server may not have got across."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    return 0, b""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_forty_large_alignments_at_once_and_two_hundred_idle_clients(tmp_path: Path):
    port = free_port()
    server = start(tmp_path, port, seconds=0.1)
    letters = "MKVLAAGIVG" * 10
    row = f">hit\n{letters}\n"
    alignment = f">query\n{letters}\n{row * ((57 << 20) // len(row))}"
    body = json.dumps({"a3m": alignment}).encode()
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        end = time.monotonic() + 120
        while ask(port, "GET", "/healthz")[0] != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: ask(port, "POST", "/v1/jobs", body), range(40)))
        statuses = {status for status, _ in answers}
        assert {201} <= statuses <= {0, 201, 503}
        assert all("error" in json.loads(text) for status, text in answers if status == 503)
        assert peak_memory(server.pid) < 2 << 30
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(port, "GET", "/healthz") == (200, b'{"status":"ok"}')
