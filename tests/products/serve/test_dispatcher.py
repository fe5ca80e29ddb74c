"""Jobs are folded again only without an answer, and given up when their workers keep ending."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from fastfold.inference.workers.job import JobResult, Task
from fastfold.products.serve import dispatcher as dispatching
from fastfold.products.serve.dispatcher import Dispatcher
from fastfold.products.serve.metrics import Metrics
from fastfold.products.serve.queue import FINAL, JobQueue
from fastfold.products.serve.request import ANSWER, JobAnswer, JobRequest, write_answer
from tests.products.serve.stub import InlineExecutor, fold


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Queued:
    """A dispatcher with some jobs of three residues."""

    def __init__(self, folder: Path, jobs: str) -> None:
        self.folder, self.queue = folder, JobQueue(folder / "queue.sqlite")
        self.seen: list[list[str]] = []
        self.metrics = Metrics(self.queue, lambda: 1)
        for job in jobs:
            (folder / job).mkdir()
            JobRequest("sequence", "MKV").write(folder / job)
            self.queue.admit(job, user="ada", name=job, residues=3, fingerprint="f")

    def dispatcher(self, function: Any) -> Dispatcher:
        def noted(number: int, task: Task) -> JobResult:
            if task.job.payload:
                self.seen.append([folder.name for folder in task.job.payload])
            return function(number, task)

        return Dispatcher(self.queue, self.folder, partial(InlineExecutor, noted), self.metrics)

    def run(self, function: Any = fold) -> dict[str, str]:
        dispatcher = self.dispatcher(function)
        dispatcher.start()
        wait_for(lambda: all(job.state in FINAL for job in self.queue.jobs()))
        dispatcher.stop()
        return {job.id: job.state for job in self.queue.jobs()}


def test_jobs_of_a_killed_server_are_answered_by_their_files_or_start_again(tmp_path: Path):
    queued = Queued(tmp_path, "abc")
    assert len(queued.queue.start_group(2)) == 2
    write_answer(tmp_path / "a", JobAnswer("failed", f"{tmp_path}/a/x.pdb is invalid"))
    assert queued.run() == {"a": "failed", "b": "done", "c": "done"}
    assert queued.seen == [["b", "c"]]
    first = queued.queue.get("a")
    assert first is not None
    assert first.text == "x.pdb is invalid"
    assert b'fastfold_answers_total{state="done"} 2.0' in queued.metrics.text()
    assert b"fastfold_group_jobs_sum 2.0" in queued.metrics.text()


@pytest.mark.parametrize(
    ("status", "how"), [("lost", "killed by SIGKILL"), ("failed", "was not finished after 0:10")]
)
def test_a_job_that_ends_its_workers_is_given_up_and_the_others_are_folded(
    tmp_path: Path, status: Any, how: str
):
    def deadly(number: int, task: Task) -> JobResult:
        if any(folder.name == "b" for folder in task.job.payload):
            return JobResult(status, how)
        return fold(number, task)

    queued = Queued(tmp_path, "abc")
    assert queued.run(deadly) == {"a": "done", "b": "failed", "c": "done"}
    assert queued.seen == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    lost = queued.queue.get("b")
    assert lost is not None
    assert lost.text == f"b: its worker ended 2 times, the last time: {how}"


def test_metrics_have_the_time_of_waits_and_folds(tmp_path: Path):
    queued = Queued(tmp_path, "a")
    time.sleep(0.05)
    queued.run(partial(fold, seconds=0.05))
    values = dict(line.split() for line in queued.metrics.text().decode().splitlines() if "_sum" in line)
    assert 0.05 <= float(values["fastfold_fold_seconds_sum"]) < 5
    assert 0.05 <= float(values["fastfold_wait_seconds_sum"]) < 5


def test_after_an_error_that_is_not_a_jobs_all_wait_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatching, "PAUSE_S", 0.1)
    results = [JobResult("fatal", "the disk is full")]

    def full(number: int, task: Task) -> JobResult:
        return results.pop() if results and task.job.payload else fold(number, task)

    queued = Queued(tmp_path, "a")
    dispatcher = queued.dispatcher(full)
    dispatcher.start()
    wait_for(lambda: dispatcher.problem == "the disk is full")
    wait_for(lambda: queued.queue.counts() == {"done": 1})
    wait_for(lambda: not dispatcher.problem)
    dispatcher.stop()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"state": "done"}', b"\xff", None])
def test_a_damaged_answer_fails_its_job_alone(tmp_path: Path, content: bytes | None):
    """None stands for a folder of the answer's name."""
    queued = Queued(tmp_path, "ab")
    queued.queue.start_group(1)
    path = tmp_path / "a" / ANSWER
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert queued.run() == {"a": "failed", "b": "done"}
    job = queued.queue.get("a")
    assert job is not None
    assert job.text.startswith("a: its answer cannot be read (")


def failing(queue: JobQueue, monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool], error: str) -> None:
    """Let all statements of a queue fail while a function says so."""
    connect = queue._connect

    class Connection:
        def __init__(self, real: sqlite3.Connection) -> None:
            self.real = real

        def execute(self, *arguments: Any) -> Any:
            if fails():
                raise sqlite3.OperationalError(error)
            return self.real.execute(*arguments)

        def __enter__(self) -> None:
            self.real.__enter__()

        def __exit__(self, *arguments: Any) -> None:
            self.real.__exit__(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(queue, "_connect", lambda: Connection(connect()))
    monkeypatch.setattr(queue, "_connection", Connection(queue._connection))


@pytest.mark.parametrize("error", ["database or disk is full", "disk I/O error", "database is locked"])
def test_an_error_of_the_queue_is_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str):
    """Also in the middle of a group: no answer is lost, and none is given twice."""
    monkeypatch.setattr(dispatching, "_RETRY_S", 0.05)
    queued = Queued(tmp_path, "abc")
    broken = threading.Event()
    failing(queued.queue, monkeypatch, broken.is_set, error)

    def breaking(number: int, task: Task) -> JobResult:
        result = fold(number, task)
        if task.job.payload:
            broken.set()
        return result

    dispatcher = queued.dispatcher(breaking)
    dispatcher.start()
    wait_for(lambda: error in dispatcher.problem)
    time.sleep(0.2)
    broken.clear()
    wait_for(lambda: not dispatcher.problem and queued.queue.counts() == {"done": 3})
    assert sorted(job.answer or 0 for job in queued.queue.jobs()) == [1, 2, 3]
    (tmp_path / "d").mkdir()
    JobRequest("sequence", "MKV").write(tmp_path / "d")
    queued.queue.admit("d", user="ada", name="d", residues=3, fingerprint="f")
    wait_for(lambda: error in dispatcher.problem)
    broken.clear()
    wait_for(lambda: queued.queue.counts() == {"done": 4})
    dispatcher.stop()
    assert queued.seen == [["a", "b", "c"], ["d"]]


def test_a_full_disk_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Results and the queue are on one disk: neither of both can be written."""
    monkeypatch.setattr(dispatching, "_RETRY_S", 0.02)
    monkeypatch.setattr(dispatching, "PAUSE_S", 0.1)
    queued, broken = Queued(tmp_path, "a"), threading.Event()
    lines: list[str] = []
    failing(queued.queue, monkeypatch, broken.is_set, "database or disk is full")

    def full(number: int, task: Task) -> JobResult:
        if not task.job.payload or lines:
            return fold(number, task)
        broken.set()
        return JobResult("fatal", "cannot write its results")

    dispatcher = queued.dispatcher(full)
    dispatcher.say = lines.append
    dispatcher.start()
    wait_for(lambda: len(lines) > 0)
    time.sleep(0.2)
    broken.clear()
    wait_for(lambda: queued.queue.counts() == {"done": 1})
    dispatcher.stop()
    assert [line for line in lines if "database" in line] == lines[:1]
    assert lines[1:] == ["error: cannot write its results"]


def test_jobs_are_recovered_once_the_queue_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatching, "_RETRY_S", 0.05)
    queued = Queued(tmp_path, "a")
    queued.queue.start_group(1)
    broken = threading.Event()
    broken.set()
    failing(queued.queue, monkeypatch, broken.is_set, "database is locked")
    dispatcher = queued.dispatcher(fold)
    dispatcher.start()
    assert "database is locked" in dispatcher.problem
    broken.clear()
    wait_for(lambda: queued.queue.counts() == {"done": 1})
    dispatcher.stop()
